// A group of World::nccl: a native communicator that no call is on, of which its roles are split
// off at their first calls, and the recorder of its calls.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/nccl/nccl_comparison.hpp"
#include "runtime/comm/nccl/nccl_memory.hpp"
#include "runtime/comm/nccl/nccl_replays.hpp"
#include "runtime/comm/nccl/nccl_role.hpp"
#include "runtime/comm/nccl/nccl_ways.hpp"
#include "runtime/comm/nccl/nccl_world.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "tessera/comm/flight_recorder.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class NcclGroup final : public World::Backend::Group {
 public:
  // `number`: of all groups of the world, also those that this rank is not in. A group without
  // ranks is one of the latter.
  NcclGroup(NcclWorld& world, int number, const GroupSeat& seat, PlainArena& arena)
      : world_(world),
        number_(number),
        seat_(seat),
        arena_(arena),
        ways_(given_ways(world.options().nccl)) {}

  // Makes the native communicator: the world's, or its part of `whole`. Collective over the world.
  void open(NcclGroup* whole);
  // Of a role, at its first call of an attempt. Collective over the group.
  void open(NcclRole& role);

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) override;
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes,
                                            std::string_view purpose) override;
  FlightRecorder& recorder() noexcept override { return recorder_; }
  bool sums_are_ordered() const noexcept override {
    return seat_.size() == 1 || world_.options().nccl.ordered_sums;
  }
  bool has_windows() const noexcept override {
    return seat_.size() > 1 && world_.options().nccl.windows;
  }

  void expect_sizes(const RankGroup& ranks, const RankGroup::Sizes& sizes) override;

  const NcclWays& ways() const noexcept { return ways_; }
  // Roles that are open are so again at their next calls, in these ways. Collective over the group,
  // and nothing is under way.
  void set_ways(const NcclWays& ways);
  // Told to each other as `what`, by all ranks of the group.
  std::vector<std::string> tell_all(std::string_view what, const std::string& own,
                                    std::chrono::milliseconds timeout) const {
    return world_.store().tell_all(concat(what, " of group ", number_), seat_.ranks, own, timeout);
  }

  NcclWorld& world() const noexcept { return world_; }
  NcclReplays& replays() noexcept { return replays_; }
  std::string look();        // what the GPU refuses; empty for nothing
  std::string late() const;  // the call that has taken too long; empty for none
  std::string position() const;
  NcclComparison& comparison() noexcept { return comparison_; }  // of the watch thread
  void forget();                // what the last attempt had under way
  std::string parting() const;  // as ProcessGroup's. Collective
  void leave() noexcept;        // the world ends, before its communicators

 private:
  // Frees memory that the program holds on none of the ranks, which have said what it does not
  // hold on them; so NCCL sees its windows end in one order.
  void free_dropped(std::span<const std::string> said);
  std::string dropped() const;  // that memory of this rank, in numbers
  void make_windows(NcclRole& role);
  void close(NcclRole& role);
  void keep_ways();  // where all ranks have measured the same

  NcclWorld& world_;
  const int number_;
  const GroupSeat seat_;
  PlainArena& arena_;
  NcclWays ways_;  // of roles that open
  bool has_measured_ = false;
  NcclWorld::Comm base_;
  FlightRecorder recorder_;
  NcclComparison comparison_{world_, number_, seat_, recorder_};
  NcclReplays replays_{recorder_};
  mutable std::mutex roles_mutex_;  // the host adds, the watch thread looks
  std::vector<std::unique_ptr<NcclRole>> roles_;
  std::vector<std::shared_ptr<NcclMemory>> memories_;  // in the order of allocation
  int allocations_ = 0;                                // of this attempt
};

// The communicator over `role`, which `group` holds.
std::unique_ptr<Communicator> make_nccl_communicator(DeviceContext& context, NcclGroup& group,
                                                     NcclRole& role, const GroupSeat& seat,
                                                     std::string_view name, StreamId stream);

}  // namespace tessera::comm
