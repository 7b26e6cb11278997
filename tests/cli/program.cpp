#include "tests/cli/program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <vector>

#include "tests/support/temporary_folder.hpp"

namespace tessera::testing {
namespace {

// stdin, stdout and stderr of the child.
class Redirection {
 public:
  Redirection(const std::string& out, const std::string& err) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT,
                                       0600);
    ::posix_spawn_file_actions_addopen(&actions_, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT,
                                       0600);
  }
  Redirection(const Redirection&) = delete;
  Redirection& operator=(const Redirection&) = delete;
  ~Redirection() { ::posix_spawn_file_actions_destroy(&actions_); }

  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_{};
};

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

Outcome run_command(const std::string& command, const std::string& folder,
                    const std::map<std::string, std::string>& variables) {
  const TemporaryFolder streams;
  const std::string binaries = std::filesystem::path(TESSERA_TRAIN).parent_path().string();
  std::vector<std::string> environment = {"PATH=" + binaries + ":/usr/local/bin:/usr/bin:/bin"};
  if (!variables.contains("TESSERA_CHECK")) environment.emplace_back("TESSERA_CHECK=1");
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<std::string> arguments = {"sh", "-c", R"(cd "$0" && eval "$1")", folder, command};

  const Redirection redirection(streams / "out", streams / "err");
  pid_t child = 0;
  if (::posix_spawn(&child, "/bin/sh", redirection.get(), nullptr, pointers(arguments).data(),
                    pointers(environment).data()) != 0) {
    throw std::runtime_error("posix_spawn failed");
  }
  int status = 0;
  rusage used{};
  if (::wait4(child, &status, 0, &used) != child) throw std::runtime_error("wait4 failed");
  Outcome outcome;
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  outcome.computed_seconds = seconds(used.ru_utime) + seconds(used.ru_stime);
  outcome.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  outcome.out = streams.read("out");
  outcome.err = streams.read("err");
  return outcome;
}

}  // namespace tessera::testing
