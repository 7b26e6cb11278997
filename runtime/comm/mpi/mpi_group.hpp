// A group of processes: its communicators of MPI, and the memory that its ranks on this host share.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "runtime/comm/mpi/host_layout.hpp"
#include "runtime/comm/mpi/mpi_channel.hpp"
#include "runtime/comm/mpi/shm.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// Memory of all ranks of `comm`, `bytes` each on pages of its own, seen by all. Made and freed
// collectively. MPI aligns to whatever its own header leaves, so a page more is asked for; mappings
// start at pages, so every process comes to the same address.
class ShmAllocation {
 public:
  ShmAllocation(MPI_Comm comm, std::int64_t bytes);
  void free() noexcept { MPI_Win_free(&win_); }

  std::vector<std::byte*> bases;  // of all ranks, here

 private:
  MPI_Win win_ = MPI_WIN_NULL;
};

// What each rank has made of its part.
template <class T>
std::vector<T*> views(const ShmAllocation& allocation) {
  std::vector<T*> all;
  for (std::byte* base : allocation.bases) all.push_back(std::launder(reinterpret_cast<T*>(base)));
  return all;
}

// The ranks of `all` that give the same `number`, in their order. Collective.
MPI_Comm split(MPI_Comm all, int number, int rank);

// Blocks until all ranks of `all`, which are on several hosts, are here.  Throws: CommError once
// the world is aborted.
void meet_beyond(MPI_Comm all, const ShmWorld& world);

// A group: its communicators of MPI, and what its ranks on this host share.
class MpiGroup final : public World::Backend::Group {
 public:
  // Takes `all`, a communicator of the group's ranks, which are on `hosts`. Collective over it.
  MpiGroup(MPI_Comm all, std::span<const int> hosts, ShmWorld& world, Transport transport,
           PlainArena& arena);
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) override;
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes) override;
  FlightRecorder& recorder() noexcept override { return shm_->recorder(shm_->rank()); }
  bool sums_are_ordered() const noexcept override { return !has_two_levels(); }

  // All ranks, before they enter MPI, where nothing wakes them.  Throws: CommError once the world
  // is aborted.
  void meet();
  void drain();
  void keep_channels() noexcept;
  bool is_held() const;  // memory, by a model of this rank
  void free() noexcept;  // collective

 private:
  struct Held {
    ShmAllocation allocation;
    std::uint64_t number;
    std::shared_ptr<bool> let_go;
  };

  bool has_two_levels() const noexcept { return spans_hosts_ && !layout_.is_flat(); }
  void free_let_go();

  MPI_Comm all_, host_ = MPI_COMM_NULL;
  int rank_ = 0, made_ = 0;
  ShmWorld& world_;
  PlainArena& arena_;
  const bool spans_hosts_;
  const bool pulls_;         // from memory that all ranks share
  const HostLayout layout_;  // of messages alone: each rank on a host of its own
  std::unique_ptr<ShmAllocation> segments_;
  std::unique_ptr<ShmGroup> shm_;  // the ranks of this host
  std::vector<Held> held_;
  std::uint64_t allocations_ = 0;
  // Where messages are sent: one a role, and what goes through it.
  std::vector<std::unique_ptr<MpiChannel>> channels_;
  std::vector<ShmAllocation> exchanges_;
};

}  // namespace tessera::comm
