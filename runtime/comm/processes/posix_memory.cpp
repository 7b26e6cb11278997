#include "runtime/comm/processes/posix_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/comm/plain_memory.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::comm {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const noexcept { return fd_; }

 private:
  const int fd_;
};

[[noreturn]] void refuse(const char* what, std::int64_t bytes, int error) {
  throw CommError(concat("World::processes: ", bytes, " bytes of shared memory can't be ", what,
                         ": ", std::strerror(error),
                         error == ENOSPC
                             ? "; make /dev/shm larger (docker: --shm-size, or --ipc=host)"
                             : "; processes need a /dev/shm that they can write to"));
}

std::byte* map_file(int fd, std::int64_t bytes) {
  void* const data =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) refuse("mapped", bytes, errno);
  return static_cast<std::byte*>(data);
}

}  // namespace

PosixMemory::PosixMemory(std::string name, int ranks, std::int64_t bytes)
    : name_(std::move(name)), bytes_(round_up(bytes, kPageBytes)) {
  bases_.resize(static_cast<std::size_t>(ranks));
}

std::string PosixMemory::name_of(int rank) const { return concat("/tessera-", name_, '-', rank); }

void PosixMemory::make(int rank) {
  const Descriptor fd(shm_open(name_of(rank).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
  if (fd < 0) refuse("made", bytes_, errno);
  int error = 0;
  while ((error = posix_fallocate(fd, 0, bytes_)) == EINTR) continue;
  if (error != 0) refuse("made", bytes_, error);
  part(rank) = map_file(fd, bytes_);
}

// A peer of another machine has the name too, but there is no such file here.
bool PosixMemory::map(int rank) {
  if (part(rank)) return true;
  const Descriptor fd(shm_open(name_of(rank).c_str(), O_RDWR, 0600));
  if (fd < 0 && errno != ENOENT && errno != EACCES) refuse("mapped", bytes_, errno);
  struct stat status{};
  if (fd < 0 || fstat(fd, &status) != 0 || status.st_size < bytes_) return false;
  part(rank) = map_file(fd, bytes_);
  return true;
}

void PosixMemory::forget_names() noexcept {
  if (name_.empty()) return;
  for (int r = 0; r < static_cast<int>(bases_.size()); ++r) shm_unlink(name_of(r).c_str());
  name_.clear();
}

void PosixMemory::free() noexcept {
  for (std::byte*& base : bases_)
    if (std::byte* const data = std::exchange(base, nullptr))
      munmap(data, static_cast<std::size_t>(bytes_));
}

}  // namespace tessera::comm
