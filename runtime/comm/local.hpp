// Ranks as threads of one process: what they share, and the communicators over it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/gpu_placement.hpp"
#include "runtime/comm/poll_thread.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/detail/device/collective_barrier.hpp"

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
  struct Allocation {
    std::int64_t bytes;
    std::string purpose;  // of the first rank that has asked
  };
  std::vector<Allocation> allocations;
  std::vector<std::size_t> asked;  // how many of them, by rank
};

// Threads: every rank's host thread.
class LocalWorld {
 public:
  LocalWorld(int size, const WorldOptions& options);

  const GpuPlacement& placement() const noexcept { return placement_; }
  AbortSignal& abort_signal() noexcept { return abort_signal_; }
  // See World::Backend.
  void commit(int rank);
  void halt(int rank, const std::string& reason);
  // A rank has ended with `reason`: nobody meets it, now or after a recovery.
  void end(int rank, const std::string& reason);
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
  // Once all have.  Throws: CommError where they have made other numbers of steps of optimizers.
  void expect_same_steps();

  // A recovery of all ranks, at a barrier of its own: each number becomes the largest that a rank
  // has, and the world is made fit for collectives again.
  // Throws: CommError where a rank has ended.
  void rejoin(DeviceContext& context, int rank, std::span<double> largest);

  // The n-th allocation of every rank has the same size.  Throws: ContractError.
  void expect_same_size(LocalGroup& group, int rank, std::int64_t bytes, std::string_view purpose);

 private:
  // Of each communicator of the rank; `f` gets the role, and which of its members the rank is.
  template <class F>
  void for_each_role(int rank, const F& f) {
    const std::lock_guard lock(mutex_);
    for (auto& [key, group] : groups_)
      if (const auto at = std::ranges::find(group.ranks, rank) - group.ranks.begin();
          at < std::ssize(group.ranks))
        for (auto& [name, role] : group.roles) f(role, static_cast<int>(at));
  }
  void expect_same_role(LocalGroup& group, int rank, int peer);
  void contribute(int rank, std::span<const double> numbers);
  void all_reduce_max(std::span<double> numbers) const;
  void rearm();
  void abort_for_ended(LocalGroup& group, const LocalRole& role, int ended, int peer);
  void look_for_late_calls();
  void look_for_late_calls(LocalGroup& group);

  const GpuPlacement placement_;
  AbortSignal abort_signal_, recovery_signal_;  // the second one a failure leaves alone
  CollectiveBarrier recovery_barrier_;
  const double timeout_s_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::vector<int>>, LocalGroup> groups_;  // by name and ranks
  std::vector<bool> left_, halted_;
  std::vector<std::array<double, World::kAgreed>> contributed_;  // by rank
  std::unique_ptr<PollThread>
      poll_thread_;  // last: its thread uses the rest; none with a HostScheduler
};

std::unique_ptr<World::Backend> make_local_backend(std::shared_ptr<LocalWorld> world, int rank);

}  // namespace tessera::comm
