// Processes of an mpirun come together through MPI.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/processes/bootstrap.hpp"

namespace tessera::comm {

class MpiSession;

class MpiBootstrap final : public Bootstrap {
 public:
  // All processes. Starts MPI, unless the program has; `free` of it ends MPI with the last world.
  static std::unique_ptr<MpiBootstrap> world();
  ~MpiBootstrap() override;  // frees nothing: a peer may never come

  using Bootstrap::exchange;
  void meet() override;
  void exchange(std::span<const std::byte> own, std::byte* all) override;
  std::unique_ptr<Bootstrap> split(int number, int order) override;
  std::unique_ptr<SharedMemory> share(std::int64_t bytes) override;
  void free() noexcept override;

  // For each rank the first one on its host. Collective.
  std::vector<int> hosts();
  MPI_Comm comm() const noexcept { return comm_; }

 private:
  // Takes `comm`.
  explicit MpiBootstrap(MPI_Comm comm, std::unique_ptr<MpiSession> session = nullptr);

  const std::unique_ptr<MpiSession> session_;  // MPI runs as long as the world's bootstrap
  MPI_Comm comm_;
};

// Memory of this rank alone, from MPI where all others have theirs.
std::unique_ptr<SharedMemory> share_with_nobody(std::int64_t bytes);

}  // namespace tessera::comm
