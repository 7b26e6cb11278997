// Ranks as threads of one process: what they share, and the communicators over it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/placement.hpp"
#include "runtime/comm/poll_thread.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/collective_barrier.hpp"

namespace tessera::comm {

// One communicator, seen from all ranks.
struct LocalRole {
  // What a rank shows its peers from publish until they all have left.
  struct alignas(64) Cell {
    Published published;
    const Collective* items = nullptr;
    Collective single;                   // what `items` points to when the group was not prepared
    std::shared_ptr<std::byte> staging;  // kStagedBytes on the rank's device
    std::uint64_t submitted = 0;         // by the host; guarded by LocalWorld's mutex
  };

  LocalRole(AbortSignal& abort_signal, std::string role, std::size_t size)
      : barrier(abort_signal, static_cast<int>(size)), name(std::move(role)), cells(size) {}

  CollectiveBarrier barrier;
  std::string name;
  std::vector<Cell> cells;  // by rank
};

// One group, seen from all its ranks, which count within it. Its world's mutex guards what changes.
struct LocalGroup {
  explicit LocalGroup(std::vector<int> members)
      : ranks(std::move(members)), recorders(ranks.size()), asked(ranks.size()) {}

  std::size_t size() const noexcept { return ranks.size(); }
  FlightRecorder& recorder(int rank) { return recorders[static_cast<std::size_t>(rank)]; }
  int name_of(int rank) const { return ranks[static_cast<std::size_t>(rank)]; }

  std::vector<int> ranks;                  // as the world counts them
  std::vector<FlightRecorder> recorders;   // by rank
  std::map<std::string, LocalRole> roles;  // made by the first rank that asks
  std::vector<std::int64_t> allocations;
  std::vector<std::size_t> asked;  // how many of them, by rank
};

// Threads: every rank's host thread.
class LocalWorld {
 public:
  LocalWorld(int size, const WorldOptions& options);

  const Placement& placement() const noexcept { return placement_; }
  AbortSignal& abort_signal() noexcept { return abort_signal_; }
  // A rank has ended with `reason`: nobody meets, now or after a recovery.
  void end(const std::string& reason);
  // Whether `what` only says that another rank has failed.
  bool is_echo(const std::string& what) const;

  // Made by the first rank that asks.
  LocalGroup& group(const GroupSeat& seat);
  LocalRole& role(LocalGroup& group, const std::string& name);

  // Call `count` of `role`, the last that the rank has recorded, can't be met by a rank that has
  // left or that has put this number on another communicator, and a rank that leaves can't meet
  // what others have submitted. Each aborts the world, naming both.
  void submitting(LocalGroup& group, LocalRole& role, int rank, std::uint64_t number);
  void leave(int rank);

  // A recovery of all ranks, at a barrier of its own: each number becomes the largest that a rank
  // has, and the world is made fit for collectives again.
  // Throws: CommError where a rank has ended.
  void rejoin(DeviceContext& context, int rank, std::span<double> largest);

  // The n-th allocation of every rank has the same size.  Throws: ContractError.
  void expect_same_size(LocalGroup& group, int rank, std::int64_t bytes);

 private:
  void expect_same_role(LocalGroup& group, int rank, int peer);
  void contribute(int rank, std::span<const double> numbers);
  void all_reduce_max(std::span<double> numbers) const;
  void rearm();
  void abort_for_ended(LocalGroup& group, const LocalRole& role, int ended, int peer);
  void look_for_late_calls();
  void look_for_late_calls(LocalGroup& group);

  const Placement placement_;
  AbortSignal abort_signal_, recovery_signal_;  // the second one a failure leaves alone
  CollectiveBarrier recovery_barrier_;
  const double timeout_s_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::vector<int>>, LocalGroup> groups_;  // by name and ranks
  std::vector<bool> left_;
  std::vector<std::array<double, World::kAgreed>> contributed_;  // by rank
  std::unique_ptr<PollThread>
      poll_thread_;  // last: its thread uses the rest; none under `shuffled`
};

std::unique_ptr<World::Backend> make_local_backend(std::shared_ptr<LocalWorld> world, int rank);

}  // namespace tessera::comm
