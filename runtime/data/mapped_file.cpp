#include "tessera/data/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera::data {
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

}  // namespace tessera::data
