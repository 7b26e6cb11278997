// A group of processes over MPI: what ranks of one host share, and between hosts one channel for
// each of its communicators.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/mpi/mpi_bootstrap.hpp"
#include "runtime/comm/mpi/mpi_channel.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/processes/host_layout.hpp"
#include "runtime/comm/processes/process_group.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// Blocks until all ranks of `all`, which are on several hosts, are here.  Throws: CommError once
// the world is aborted.
void meet_beyond(const Bootstrap& all, const ShmWorld& world);

class MpiGroup final : public ProcessGroup {
 public:
  // `all` is a MpiBootstrap. Collective over it.
  MpiGroup(std::unique_ptr<Bootstrap> all, std::string name, std::span<const int> hosts,
           ShmWorld& world, Transport transport, PlainArena& arena);

  bool sums_are_ordered() const noexcept override { return !has_two_levels(); }
  void meet(const char* why) override;
  void free() noexcept override;

  void drain();
  // To the end of the process: MPI may still send from them.
  void keep_channels() noexcept;

 private:
  std::unique_ptr<Communicator> make_communicator(DeviceContext& context, int number,
                                                  const GroupSeat& seat, std::string_view role,
                                                  StreamId stream) override;
  std::shared_ptr<SymmetricMemory> make_memory(DeviceContext& context, std::int64_t bytes) override;
  bool has_two_levels() const noexcept { return spans_hosts_ && !layout_.is_flat(); }

  PlainArena& arena_;
  const bool spans_hosts_;
  const bool pulls_;         // from memory that all ranks share
  const HostLayout layout_;  // of messages alone: each rank on a host of its own
  // Where messages are sent: one a role, and what goes through it.
  std::vector<std::unique_ptr<MpiChannel>> channels_;
  std::vector<std::unique_ptr<SharedMemory>> exchanges_;
};

}  // namespace tessera::comm
