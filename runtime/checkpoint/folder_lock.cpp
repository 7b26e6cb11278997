#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/checkpoint/together.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"

namespace tessera::checkpoint {

FolderLock::FolderLock(const std::string& folder, const World& world) {
  on_all(world, [&] {
    if (world.rank() != 0) return;
    descriptor_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor_ < 0)
      throw DataError(concat('\'', folder, "' cannot be locked: ", std::strerror(errno)));
    // Other refusals are of file systems that have no locks, as Lustre mounted without them and
    // NFS for folders.
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
    ::close(descriptor_);
    descriptor_ = -1;
    throw DataError(concat('\'', folder,
                           "' is in use by another run, which saves checkpoints there; "
                           "wait for its end, or name another folder"));
  });
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace tessera::checkpoint
