// The twin of mpi.cpp in a build without MPI.
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"

namespace tessera {

bool World::has_mpi() noexcept { return false; }

World World::mpi(const WorldOptions&) {
  throw CommError(
      "World::mpi: this build has no MPI; apt-get install libopenmpi-dev openmpi-bin and configure "
      "with -Dmpi=enabled");
}

}  // namespace tessera
