#include "tests/cli/program.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "tests/support/temporary_folder.hpp"

namespace tessera::test {
namespace {

[[noreturn]] void become(const std::string& script, const std::string& folder,
                         const std::string& out, const std::string& err,
                         const std::vector<std::string>& environment) {
  std::vector<char*> pointers;
  for (const std::string& variable : environment)
    pointers.push_back(const_cast<char*>(variable.c_str()));
  pointers.push_back(nullptr);
  const char* const arguments[] = {"sh", "-c", script.c_str(), nullptr};
  if (::chdir(folder.c_str()) == 0 && ::freopen("/dev/null", "r", stdin) &&
      ::freopen(out.c_str(), "w", stdout) && ::freopen(err.c_str(), "w", stderr)) {
    ::execve("/bin/sh", const_cast<char**>(arguments), pointers.data());
  }
  ::_exit(127);
}

}  // namespace

Outcome run_command(const std::string& command, const std::string& folder,
                    const std::map<std::string, std::string>& variables) {
  const TemporaryFolder streams;
  const std::string binaries = std::filesystem::path(TESSERA_TRAIN).parent_path().string();
  std::vector<std::string> environment = {"PATH=" + binaries + ":/usr/local/bin:/usr/bin:/bin"};
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);

  const auto begin = std::chrono::steady_clock::now();
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) become(command, folder, streams / "out", streams / "err", environment);
  int status = 0;
  if (::waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");
  Outcome outcome;
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  outcome.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  outcome.out = streams.read("out");
  outcome.err = streams.read("err");
  return outcome;
}

}  // namespace tessera::test
