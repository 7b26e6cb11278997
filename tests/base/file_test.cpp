// Files appear whole or not at all, whoever else writes them, and are refused before work is done.
#include "tessera/base/file.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using testing::TemporaryFolder;

namespace {

unsigned mode_of(const std::string& path) {
  struct stat status{};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_mode & 0777u;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// Fails writes beyond `bytes` for the length of the scope, as a full disk does.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit small{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

}  // namespace

TEST_CASE("a file appears when it is committed, and not before") {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "old");
  for (const bool flush : {true, false}) {
    WholeFile file(path, {.flush = flush});
    file.write("new ");
    file.write(flush ? "flushed" : "fast");
    CHECK(folder.entries() == 2);
    CHECK(folder.read("file") == (flush ? "old" : "new flushed"));
    file.commit();
    CHECK(file.is_committed());
    CHECK(folder.entries() == 1);
    CHECK_THROWS_AS(file.write("more"), ContractError);
    CHECK_THROWS_AS(file.commit(), ContractError);
  }
  const MappedFile mapped(path, "file");
  CHECK(text_of(mapped) == "new fast");
  {
    WholeFile(path).write("never");
  }
  CHECK(folder.read("file") == "new fast");
  CHECK(folder.entries() == 1);
}

TEST_CASE("what was mapped stays as it was while the file is replaced") {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "old");
  const MappedFile mapped(path, "file");
  write_whole(path, "newer");
  CHECK(text_of(mapped) == "old");
  CHECK(folder.read("file") == "newer");
}

TEST_CASE("writers of one file do not meet, and one of them is the last") {
  const TemporaryFolder folder;
  std::vector<std::jthread> writers;
  for (char c = 'a'; c < 'e'; ++c)
    writers.emplace_back([&folder, c] {
      for (int i = 0; i < 50; ++i)
        write_whole(folder / "file", std::string(1000, c), {.flush = false});
    });
  writers.clear();
  const std::string text = folder.read("file");
  CHECK(text == std::string(1000, text.at(0)));
  CHECK(folder.entries() == 1);
}

TEST_CASE("a file can be kept from others") {
  const TemporaryFolder folder;
  write_whole(folder / "private", "x", {.mode = 0600});
  CHECK(mode_of(folder / "private") == 0600u);
}

TEST_CASE("a disk that fills up is a device error, leaves nothing and keeps what was there") {
  const TemporaryFolder folder;
  folder.write("file", "old");
  std::string fault;
  {
    const FullDisk full(4096);
    try {
      write_whole(folder / "file", std::string(8192, 'x'));
    } catch (const DeviceError& error) {
      fault = error.what();
    }
  }
  CHECK(fault == "'" + folder / "file" + "' could not be written: File too large");
  CHECK(folder.read("file") == "old");
  CHECK(folder.entries() == 1);
}

TEST_CASE("what cannot be written is refused before anything is") {
  const TemporaryFolder folder;
  folder.write("file", "");
  const auto refusal = [](const std::string& path) -> std::string {
    try {
      check_writable(path);
    } catch (const DataError& error) {
      return error.what();
    }
    return "none";
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(refusal(folder / "none/m"), "No such file or directory"));
  CHECK(has(refusal(folder / "file/m"), "is not a folder"));
  CHECK(has(refusal(folder.path().string()), "is a folder"));
  CHECK(has(refusal(folder / "none/"), "is a folder"));
  CHECK(has(refusal(""), "is a folder"));
  CHECK(has(refusal("/dev/null"), "is not a regular file"));
  CHECK(refusal(folder / "file") == "none");
  CHECK(refusal(folder / "new") == "none");
  CHECK_THROWS_AS(WholeFile(folder / "none/m"), DeviceError);
}
