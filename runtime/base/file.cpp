#include "tessera/base/file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "runtime/base/held_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path, const std::string& reason) {
  throw DataError(concat(what, " '", path, "' ", reason));
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// What a write to `path` creates or replaces: the end of its symbolic links, also of one whose file
// is not there yet, in a folder that is spelt in one way only.
std::string target_of(const std::string& path) {
  constexpr int kMaxLinks = 40;  // Linux gives up there too
  std::error_code ignored;       // what cannot be resolved stays as it was given
  std::filesystem::path file = path;
  for (int i = 0; i < kMaxLinks && std::filesystem::is_symlink(file, ignored); ++i)
    file = file.parent_path() / std::filesystem::read_symlink(file, ignored);
  const std::filesystem::path folder = std::filesystem::weakly_canonical(
      std::filesystem::absolute(folder_of(file.string()), ignored), ignored);
  return folder.empty() ? file.string() : (folder / file.filename()).string();
}

// Temporary names beside `target` until one is free for `make`; empty where it fails otherwise, as
// errno says. A process of the same number that was killed may have left such a file.
template <class F>
std::string under_new_name(const std::string& target, const F& make) {
  static std::atomic<unsigned> counter{0};
  do {
    const std::string name = concat(target, ".tmp-", ::getpid(), "-", counter.fetch_add(1));
    if (make(name)) return name;
  } while (errno == EEXIST);
  return "";
}

std::string link_of(int descriptor) { return concat("/proc/self/fd/", descriptor); }

// A descriptor of the file, or -1, as errno says.
int opened(const std::string& path, Links links) {
  // Without O_NONBLOCK the open of a named pipe would wait for a writer for ever.
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  if (links == Links::followed) return ::open(path.c_str(), kFlags);
  if (links == Links::refused) return ::open(path.c_str(), kFlags | O_NOFOLLOW);
  const std::string folder = folder_of(path);
  const int around = ::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (around < 0) {
    const int error = errno;
    std::error_code ignored;
    errno = error == ENOTDIR && std::filesystem::is_symlink(folder, ignored) ? ELOOP : error;
    return -1;
  }
  const int file = ::openat(around, path.c_str() + path.rfind('/') + 1, kFlags | O_NOFOLLOW);
  const int error = errno;
  ::close(around);
  errno = error;
  return file;
}

}  // namespace

OpenFile::OpenFile(std::string path, const char* what, int descriptor)
    : path_(std::move(path)), what_(what), descriptor_(descriptor) {}

// The object is whole when the body begins, so that what is thrown there closes the file.
OpenFile::OpenFile(std::string path, const char* what, Links links)
    : OpenFile(std::move(path), what, -1) {
  descriptor_ = opened(path_, links);
  if (descriptor_ < 0) {
    if (errno == ELOOP && links != Links::followed)
      fail(what, path_,
           links == Links::refused
               ? "is a symbolic link; copy the file to its place"
               : "or its folder is a symbolic link; copy what it names to its place");
    if (errno == ENOENT) fail(what, path_, "does not exist; check the path");
    if (errno == EMFILE || errno == ENFILE)
      throw TooManyFiles(concat(what, " '", path_, "' cannot be opened: ", std::strerror(errno),
                                "; raise the limit (ulimit -n)"));
    fail(what, path_, concat("cannot be opened: ", std::strerror(errno)));
  }
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) {
    fail(what, path_, concat("cannot be examined: ", std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) fail(what, path_, "is a folder; name a file in it");
  if (!S_ISREG(status.st_mode))
    fail(what, path_, "is not a regular file; copy its contents into one");
  size_bytes_ = status.st_size;
}

OpenFile::OpenFile(OpenFile&& other) noexcept
    : path_(std::move(other.path_)),
      what_(other.what_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_bytes_(other.size_bytes_) {}

OpenFile& OpenFile::operator=(OpenFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(what_, other.what_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

OpenFile::~OpenFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::size_t OpenFile::read_some(std::int64_t offset, std::span<std::byte> into) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t count = ::pread(descriptor_, into.data() + done, into.size() - done,
                                  offset + static_cast<std::int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw DeviceError(concat(what_, " '", path_, "' cannot be read: ", std::strerror(errno)));
    if (count == 0) break;
    done += static_cast<std::size_t>(count);
  }
  return done;
}

void OpenFile::read(std::int64_t offset, std::span<std::byte> into) const {
  const std::size_t done = read_some(offset, into);
  if (done == into.size()) return;
  throw DeviceError(concat(what_, " '", path_, "' shrank while it was read: it had ", size_bytes_,
                           " bytes, and ends before byte ", offset + std::int64_t(into.size()),
                           "; leave it alone while it is in use"));
}

MappedFile::MappedFile(std::string path, const char* what) : path_(std::move(path)) {
  const OpenFile file(path_, what);    // the mapping outlives the descriptor
  if (file.size_bytes() == 0) return;  // the kernel maps no empty file

  const auto size = static_cast<std::size_t>(file.size_bytes());
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (address == MAP_FAILED) {
    fail(what, path_, concat("cannot be mapped (", size, " bytes): ", std::strerror(errno)));
  }
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  if (::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()) != 0) {
    log(LogLevel::error, concat("munmap of '", path_, "' failed: ", std::strerror(errno)));
  }
}

WholeFile::WholeFile(std::string path, WholeFileOptions options)
    : path_(std::move(path)), target_(target_of(path_)), options_(options) {
  struct stat replaced{};
  const bool replaces = ::stat(target_.c_str(), &replaced) == 0;
  const unsigned mode = replaces ? options.mode & replaced.st_mode : options.mode;
  descriptor_ = ::open(folder_of(target_).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
  // A name is given to it by way of /proc.
  if (descriptor_ >= 0 && ::access(link_of(descriptor_).c_str(), F_OK) != 0)
    ::close(std::exchange(descriptor_, -1));
  if (descriptor_ < 0)
    temporary_ = under_new_name(target_, [&](const std::string& name) {
      descriptor_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      return descriptor_ >= 0;
    });
  if (descriptor_ < 0) fail(errno);
  // The process's mask may have taken rights that the replaced file gives. A file system without
  // rights refuses, and nobody loses any.
  if (replaces && ::fchmod(descriptor_, mode) != 0) errno = 0;
}

WholeFile::~WholeFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty() && ::unlink(temporary_.c_str()) != 0) {
    log(LogLevel::error, concat("'", temporary_, "' cannot be removed: ", std::strerror(errno)));
  }
}

void WholeFile::fail(int error) const {
  throw DeviceError(concat("'", path_, "' could not be written: ", std::strerror(error)));
}

// The name that is sought may be another file's, and no call puts a file in the place of another
// without a name in between.
void WholeFile::give_name() {
  if (!temporary_.empty()) return;
  temporary_ = under_new_name(target_, [&](const std::string& name) {
    return ::linkat(AT_FDCWD, link_of(descriptor_).c_str(), AT_FDCWD, name.c_str(),
                    AT_SYMLINK_FOLLOW) == 0;
  });
  if (temporary_.empty()) fail(errno);
}

void WholeFile::write(std::span<const std::byte> bytes) {
  TESSERA_EXPECT(!is_committed(), "WholeFile::write: '", path_, "' is committed already");
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void WholeFile::commit() {
  TESSERA_EXPECT(!is_committed(), "WholeFile::commit: '", path_, "' is committed already");
  if (options_.flush && ::fsync(descriptor_) != 0) fail(errno);
  const HeldSignals until_it_is_whole;
  give_name();
  if (::close(std::exchange(descriptor_, -1)) != 0) fail(errno);
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_.clear();
  is_committed_ = true;
  if (!options_.flush) return;
  // The new name is on the disk only when its folder is. A folder that cannot be opened leaves a
  // whole file all the same.
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

void write_whole(const std::string& path, std::string_view text, WholeFileOptions options) {
  WholeFile file(path, options);
  file.write(text);
  file.commit();
}

void check_writable(const std::string& path) {
  struct stat status{};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  // A file would take the place of the link.
  if (!exists && errno == ELOOP)
    throw DataError(concat("'", path, "' cannot be written: ", std::strerror(ELOOP)));
  if (path.empty() || path.back() == '/' || (exists && S_ISDIR(status.st_mode))) {
    throw DataError(concat("'", path, "' is a folder; name a file in it"));
  }
  // A rename would take the place of a device.
  if (exists && !S_ISREG(status.st_mode)) {
    throw DataError(concat("'", path, "' is not a regular file; name another one"));
  }
  if (exists && ::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0) {
    throw DataError(concat("'", path, "' cannot be replaced: ", std::strerror(errno)));
  }
  const std::string folder = folder_of(path);
  if (::stat(folder.c_str(), &status) != 0) {
    throw DataError(concat("'", path, "' cannot be written: the folder '", folder,
                           "' cannot be used (", std::strerror(errno), ")"));
  }
  if (!S_ISDIR(status.st_mode)) {
    throw DataError(concat("'", path, "' cannot be written: '", folder, "' is not a folder"));
  }
  try {
    const HeldSignals until_it_is_gone;
    WholeFile trial(path);
    trial.give_name();
  } catch (const DeviceError& error) {
    throw DataError(error.what(), error.where());
  }
}

void check_space(const std::string& path, std::int64_t bytes) {
  struct statvfs disk{};
  if (::statvfs(folder_of(target_of(path)).c_str(), &disk) != 0) return;  // check_writable says why
  const auto free = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  if (free < static_cast<double>(bytes))
    throw DataError(concat("'", path, "' needs ", bytes, " bytes, and its disk has ",
                           static_cast<std::int64_t>(free), " free; name another folder"));
}

std::string file_identity(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) return target_of(path);
  return concat("file ", status.st_ino, " of device ", status.st_dev);
}

}  // namespace tessera
