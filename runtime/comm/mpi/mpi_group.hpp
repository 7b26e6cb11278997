// A group of processes: its communicators of MPI, and the memory that its ranks on this host share.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

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

// The ranks of `all` on this host, in their order. Collective.
MPI_Comm split_by_host(MPI_Comm all, int rank);

// A group: its communicators of MPI, and what its ranks on this host share.
class MpiGroup final : public World::Backend::Group {
 public:
  // Takes `all`, a communicator of the group's ranks. Collective over it.
  MpiGroup(MPI_Comm all, ShmWorld& world, Transport transport, PlainArena& arena);
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) override;
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes) override;
  FlightRecorder& recorder() noexcept override { return shm_->recorder(shm_->rank()); }

  // All ranks of the host's part of the group, before they enter MPI, where nothing wakes them.
  void meet() { shm_->meet_to_allocate(); }
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

  void free_let_go();

  MPI_Comm all_, host_ = MPI_COMM_NULL;
  int rank_ = 0, made_ = 0;
  ShmWorld& world_;
  PlainArena& arena_;
  bool pulls_ = false;  // from memory that all ranks share; else by messages
  std::unique_ptr<ShmAllocation> segments_;
  std::unique_ptr<ShmGroup> shm_;  // the ranks of this host
  std::vector<Held> held_;
  std::uint64_t allocations_ = 0;
  std::vector<std::unique_ptr<MpiChannel>> channels_;  // one a role, where messages are sent
};

}  // namespace tessera::comm
