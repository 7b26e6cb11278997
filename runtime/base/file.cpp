#include "tessera/base/file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path, const std::string& reason) {
  throw DataError(concat(what, " '", path, "' ", reason));
}

// Closes a descriptor at the end of the scope; the mapping outlives it.
class DescriptorGuard {
 public:
  explicit DescriptorGuard(int descriptor) : descriptor_(descriptor) {}
  DescriptorGuard(const DescriptorGuard&) = delete;
  DescriptorGuard& operator=(const DescriptorGuard&) = delete;
  ~DescriptorGuard() { ::close(descriptor_); }

 private:
  int descriptor_;
};

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

MappedFile::MappedFile(std::string path, const char* what) : path_(std::move(path)) {
  // Without O_NONBLOCK the open of a named pipe would wait for a writer for ever.
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    if (errno == ENOENT) fail(what, path_, "does not exist; check the path");
    fail(what, path_, concat("cannot be opened: ", std::strerror(errno)));
  }
  const DescriptorGuard guard(descriptor);
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) {
    fail(what, path_, concat("cannot be examined: ", std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) fail(what, path_, "is a folder; name a file in it");
  if (!S_ISREG(status.st_mode))
    fail(what, path_, "is not a regular file; copy its contents into one");
  if (status.st_size == 0) return;  // the kernel maps no empty file

  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
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
    : path_(std::move(path)), options_(options) {
  static std::atomic<unsigned> counter{0};
  do {  // a process of the same number that was killed may have left such a file
    temporary_ = concat(path_, ".tmp-", ::getpid(), "-", counter.fetch_add(1));
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, options.mode);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail(errno);
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
  if (::close(std::exchange(descriptor_, -1)) != 0) fail(errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail(errno);
  temporary_.clear();
  if (!options_.flush) return;
  // The new name is on the disk only when its folder is. A folder that cannot be opened leaves a
  // whole file all the same.
  const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
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
  if (path.empty() || path.back() == '/' || (exists && S_ISDIR(status.st_mode))) {
    throw DataError(concat("'", path, "' is a folder; name a file in it"));
  }
  // A rename would take the place of a device.
  if (exists && !S_ISREG(status.st_mode)) {
    throw DataError(concat("'", path, "' is not a regular file; name another one"));
  }
  const std::string folder = folder_of(path);
  if (::stat(folder.c_str(), &status) != 0) {
    throw DataError(concat("'", path, "' cannot be written: the folder '", folder,
                           "' cannot be used (", std::strerror(errno), ")"));
  }
  if (!S_ISDIR(status.st_mode)) {
    throw DataError(concat("'", path, "' cannot be written: '", folder, "' is not a folder"));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw DataError(concat("'", path, "' cannot be written in the folder '", folder,
                           "': ", std::strerror(errno)));
  }
}

}  // namespace tessera
