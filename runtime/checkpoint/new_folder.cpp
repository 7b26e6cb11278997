#include "runtime/checkpoint/new_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <utility>
#include <vector>

#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kHidden = ".unfinished-", kRemoved = ".removed-";

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw DeviceError(concat('\'', path, "' ", what, ": ", std::strerror(errno)));
}

Descriptor open_folder(const std::string& path) {
  return Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
}

void remove_tree(const std::string& path) {
  if (::rmdir(path.c_str()) == 0) return;  // an empty one, which takes no descriptor
  std::error_code error;
  std::filesystem::remove_all(path, error);
  // Another program may have begun to remove it, too.
  if (error && error != std::errc::no_such_file_or_directory)
    log(LogLevel::error, concat("'", path, "' cannot be removed: ", error.message()));
}

// Where a file system has no locks, as Lustre mounted without them, no sweep takes one either.
bool is_locked(const Descriptor& folder) {
  return ::flock(folder.number(), LOCK_EX) == 0 || errno == ENOSYS || errno == EOPNOTSUPP;
}

// Whether it is this folder that has the name.
bool is_at(const Descriptor& folder, const std::string& path) {
  struct stat own{}, named{};
  return ::fstat(folder.number(), &own) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

// Whether a folder of this name was made on another host within the last day.
bool is_lately_others(const std::string& path) {
  constexpr std::size_t kDigits = 16;
  constexpr std::time_t kDay = 24 * 60 * 60;
  std::uint64_t host = 0;
  const std::string_view id = std::string_view(path).substr(path.rfind('-') + 1);
  struct stat status{};
  return id.size() == 2 * kDigits && read_hex(id.substr(0, kDigits), host) &&
         host != NewFolder::own_host() && ::lstat(path.c_str(), &status) == 0 &&
         std::time(nullptr) - status.st_mtim.tv_sec < kDay;
}

// Where the hidden folder at `path` has no owner: takes it away.
void remove_if_left(const std::string& path) {
  if (is_lately_others(path)) return;
  const Descriptor folder = open_folder(path);
  if (folder.number() < 0 || ::flock(folder.number(), LOCK_EX | LOCK_NB) != 0) return;
  // Another program may have taken this one away, and the owner made the next.
  if (is_at(folder, path)) remove_tree(path);
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}
Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

NewFile::NewFile(std::string path)
    : path_(std::move(path)),
      descriptor_(
          ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666)) {
  if (descriptor_.number() < 0) fail(path_, "could not be made");
}

void NewFile::write(std::int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(descriptor_.number(), bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;  // the file takes nothing more, and the system gives no reason
    if (count <= 0) fail(path_, "could not be written");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

void NewFile::flush(std::int64_t offset, std::int64_t size_bytes) {
  constexpr std::int64_t kBehind = 64 << 20;
  const auto sync = [&](std::int64_t from, unsigned how) {
    if (::sync_file_range(descriptor_.number(), from, size_bytes, how) == 0) return;
    // Some file systems have nothing like it.
    if (errno != EINVAL && errno != ENOSYS && errno != ESPIPE)
      fail(path_, "could not be written to the disk");
  };
  sync(offset, SYNC_FILE_RANGE_WRITE);
  if (offset >= kBehind)
    sync(offset - kBehind,
         SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
}

void NewFile::finish() {
  if (::fsync(descriptor_.number()) != 0) fail(path_, "could not be written to the disk");
  descriptor_ = Descriptor();
}

std::string with_path(std::string message, const std::string& path, const std::string& shown) {
  for (std::size_t at = 0; (at = message.find(path, at)) != message.npos; at += shown.size())
    message.replace(at, path.size(), shown);
  return message;
}

void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number() < 0 || ::fsync(folder.number()) != 0)
    fail(path, "could not be written to the disk");
}

NewFolder::NewFolder(const std::string& folder, const std::string& name, const std::string& id)
    : folder_(folder), path_(concat(folder, '/', name)), hidden_(hidden(folder, name, id)) {
  // Until it is locked, a sweep may take it for one that was left: then it is made anew.
  do {
    if (::mkdir(hidden_.c_str(), 0777) != 0)
      throw DataError(concat('\'', folder, "' cannot take a new folder: ", std::strerror(errno)));
    lock_ = open_folder(hidden_);
    const bool is_swept = lock_.number() < 0 && errno == ENOENT;
    if (!is_swept && (lock_.number() < 0 || !is_locked(lock_))) {
      const int error = errno;
      remove_tree(hidden_);
      errno = error;
      fail(folder_, "cannot take a new folder, which could not be locked");
    }
  } while (!is_at(lock_, hidden_));
}

NewFolder::~NewFolder() {
  if (!is_committed_) remove_tree(hidden_);
}

std::string NewFolder::hidden(const std::string& folder, const std::string& name,
                              const std::string& id) {
  return concat(folder, '/', kHidden, name, '-', id);
}

void NewFolder::commit() {
  sync_folder(hidden_);
  // An older kernel's file system knows no RENAME_NOREPLACE; a rename there replaces an empty
  // folder at most.
  int failed = ::renameat2(AT_FDCWD, hidden_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE);
  if (failed != 0 && errno == EINVAL) failed = std::rename(hidden_.c_str(), path_.c_str());
  if (failed != 0 && (errno == EEXIST || errno == ENOTEMPTY))
    throw DataError(concat('\'', path_, "' exists already and is kept; name another folder"));
  if (failed != 0) fail(path_, "could not be given its name");
  is_committed_ = true;
  sync_folder(folder_);
}

std::uint64_t NewFolder::own_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return checksum_of(name, std::strlen(name));
}

void NewFolder::sweep(const std::string& folder) {
  std::error_code ignored;
  std::vector<std::string> left;
  for (std::filesystem::directory_iterator at(folder, ignored), end; at != end;
       at.increment(ignored)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with(kHidden) || name.starts_with(kRemoved))
      left.push_back(at->path().string());
  }
  for (const std::string& path : left) remove_if_left(path);
}

void NewFolder::remove(const std::string& folder, const std::string& name, const std::string& id) {
  const std::string path = concat(folder, '/', name),
                    removed = concat(folder, '/', kRemoved, name, '-', id);
  if (std::rename(path.c_str(), removed.c_str()) != 0) {
    if (errno == ENOENT) return;  // another program has removed it
    fail(path, "could not be removed");
  }
  sync_folder(folder);
  remove_tree(removed);
}

}  // namespace tessera::checkpoint
