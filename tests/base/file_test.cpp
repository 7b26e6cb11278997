// Files appear whole or not at all, whoever else writes them, and are refused before work is done.
#include "tessera/base/file.hpp"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

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

std::string refusal(const std::string& path) {
  try {
    check_writable(path);
  } catch (const DataError& error) {
    return error.what();
  }
  return "none";
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

TEST_CASE("a file that is being written has no name, so a killed process leaves nothing") {
  const TemporaryFolder folder;
  if (folder.entries_of_unfinished() > 0) {
    WARN("not tested: this file system has no files without a name");
    return;
  }
  const std::string path = folder.write("file", "old");
  const pid_t child = ::fork();
  if (child == 0) {
    WholeFile file(path);
    file.write("half of it");
    ::kill(::getpid(), SIGKILL);
  }
  REQUIRE(child > 0);
  ::waitpid(child, nullptr, 0);
  CHECK(folder.entries() == 1);
  CHECK(folder.read("file") == "old");
}

TEST_CASE("a file appears when it is committed, and not before") {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "old");
  for (const bool flush : {true, false}) {
    WholeFile file(path, {.flush = flush});
    file.write("new ");
    file.write(flush ? "flushed" : "fast");
    CHECK(folder.entries() == 1 + folder.entries_of_unfinished());
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

TEST_CASE("a file that shrinks while it is read is named") {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "0123456789");
  const OpenFile file(path, "file");
  REQUIRE(file.size_bytes() == 10);
  std::vector<std::byte> bytes(4);
  file.read(6, bytes);
  CHECK(bytes.back() == std::byte{'9'});
  REQUIRE(::truncate(path.c_str(), 8) == 0);
  CHECK(file.read_some(6, bytes) == 2);
  std::string fault;
  try {
    file.read(6, bytes);
  } catch (const DeviceError& error) {
    fault = error.what();
  }
  CHECK(fault == "file '" + path +
                     "' shrank while it was read: it had 10 bytes, and ends before byte 10; leave "
                     "it alone while it is in use");
}

TEST_CASE("a link to a file stays, and what it names is replaced or made") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "other");
  folder.write("other/file", "old");
  std::filesystem::create_symlink("other/file", folder / "link");
  std::filesystem::create_symlink("other/new", folder / "ahead");
  std::filesystem::create_symlink("ahead", folder / "chain");
  for (const char* name : {"link", "chain"}) {
    check_writable(folder / name);
    write_whole(folder / name, name);
    CHECK(std::filesystem::is_symlink(folder / name));
  }
  CHECK(folder.read("other/file") == "link");
  CHECK(folder.read("other/new") == "chain");
  CHECK(folder.entries() == 4);
  std::filesystem::create_symlink("loop", folder / "loop");
  CHECK(testing::has(refusal(folder / "loop"), "Too many levels of symbolic links"));
}

TEST_CASE("a file that is replaced keeps its mode") {
  const TemporaryFolder folder;
  for (const unsigned mode : {0600u, 0664u, 0444u}) {
    const std::string path = folder.write("file", "old");
    REQUIRE(::chmod(path.c_str(), mode) == 0);
    write_whole(path, "new");
    CHECK(mode_of(path) == mode);
    std::filesystem::remove(path);
  }
  folder.write("open", "old");
  REQUIRE(::chmod((folder / "open").c_str(), 0644) == 0);
  write_whole(folder / "open", "private", {.mode = 0600});
  CHECK(mode_of(folder / "open") == 0600u);
}

TEST_CASE("one file is recognised under all its names") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  std::filesystem::create_directory_symlink("real", folder / "folder");
  folder.write("there", "");
  std::filesystem::create_hard_link(folder / "there", folder / "hard");
  std::filesystem::create_symlink("real/new", folder / "ahead");
  const auto same = [&](const char* a, const char* b) {
    return file_identity(folder / a) == file_identity(folder / b);
  };
  CHECK(same("there", "./real/../there"));
  CHECK(same("there", "hard"));
  CHECK(same("real/new", "folder/new"));
  CHECK(same("real/new", "ahead"));
  CHECK(same("new", "./folder/../new"));
  CHECK(same("none/new", "./none/new"));
  CHECK_FALSE(same("there", "new"));
  CHECK_FALSE(same("real/new", "new"));
  CHECK(file_identity("a") == file_identity("./a"));
  CHECK(file_identity("a") == file_identity((std::filesystem::current_path() / "a").string()));
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
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(refusal(folder / "none/m"), "No such file or directory"));
  CHECK(has(refusal(folder / "file/m"), "is not a folder"));
  CHECK(has(refusal(folder.path().string()), "is a folder"));
  CHECK(has(refusal(folder / "none/"), "is a folder"));
  CHECK(has(refusal(""), "is a folder"));
  CHECK(has(refusal("/dev/null"), "is not a regular file"));
  // The temporary name is longer than the file's, which alone fits the system's 255 bytes.
  CHECK(has(refusal(folder / std::string(250, 'x')), "File name too long"));
  CHECK(has(refusal("/proc/x"), "could not be written"));
  CHECK(refusal(folder / "file") == "none");
  CHECK(refusal(folder / "new") == "none");
  CHECK_THROWS_AS(WholeFile(folder / "none/m"), DeviceError);
}

TEST_CASE("a file that its owner may not write is not replaced") {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "old");
  REQUIRE(::chmod(path.c_str(), 0444) == 0);
  REQUIRE(::chmod(folder.path().c_str(), 0777) == 0);
  const uid_t nobody = 65534, self = ::geteuid();
  if (self == 0) REQUIRE(::seteuid(nobody) == 0);  // root may write everything
  const std::string fault = refusal(path);
  REQUIRE(::seteuid(self) == 0);
  CHECK(fault == "'" + path + "' cannot be replaced: Permission denied");
}

TEST_CASE("a disk without room for a file is named, and one with it is not") {
  const TemporaryFolder folder;
  CHECK_NOTHROW(check_space(folder / "small", 1));
  CHECK_THROWS_WITH(check_space(folder / "large", std::int64_t{1} << 62),
                    Catch::Contains("large' needs 4611686018427387904 bytes") &&
                        Catch::Contains(" free; name another folder"));
  CHECK_NOTHROW(check_space("none/file", 1));  // check_writable's to say
}

TEST_CASE("links are followed, refused in the last name, or in the folder around it, too") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  folder.write("real/file", "text");
  std::filesystem::create_symlink("file", folder / "real/link");
  std::filesystem::create_directory_symlink("real", folder / "linked");
  const auto opens = [&](const char* name, Links links) {
    try {
      const OpenFile file(folder / name, "file", links);
      return std::string("opened");
    } catch (const DataError& error) {
      return std::string(error.what());
    }
  };
  for (const char* const name : {"real/file", "real/link", "linked/file"})
    CHECK(opens(name, Links::followed) == "opened");
  CHECK(opens("real/file", Links::refused) == "opened");
  CHECK(opens("linked/file", Links::refused) == "opened");
  CHECK(testing::has(opens("real/link", Links::refused), "is a symbolic link"));
  CHECK(opens("real/file", Links::refused_with_folder) == "opened");
  for (const char* const name : {"real/link", "linked/file", "linked/link"})
    CHECK(testing::has(opens(name, Links::refused_with_folder),
                       "or its folder is a symbolic link; copy what it names to its place"));
  CHECK(testing::has(opens("none/file", Links::refused_with_folder), "does not exist"));
  CHECK(testing::has(opens("real/file/x", Links::refused_with_folder), "Not a directory"));
}
