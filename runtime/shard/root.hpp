// The root that units lie under: which units these are, what they share (slots, sums over replicas,
// the way to the host), and calls of any of them. What happens to a unit in backward says
// BackwardOrder.
//
//   the root's first call      build    find the units, compare them with other ranks', lay them
//   out each call after it         follow   likewise where units were added, or frozen, since
//                              begin_forward, begin_call .. end_call
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/shard/backward_order.hpp"
#include "runtime/shard/host_link.hpp"
#include "runtime/shard/replicas.hpp"
#include "runtime/shard/slots.hpp"
#include "runtime/shard/symmetric_gradients.hpp"
#include "runtime/shard/unit_shards.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"

namespace tessera::shard {

class Unit;

class Root : public std::enable_shared_from_this<Root> {
 public:
  // Makes a root for the units below `module`, which is one, in the place of those that they had.
  // Collective: allocates their slots. `counted`: of the same root before.
  // Throws: ContractError, before anything has changed, for a parameter without a unit, for units
  // under a root elsewhere, and where backward may still come for a forward of theirs.
  static void build(nn::Module& module, const ShardCounters& counted = {});
  // Of this host thread, in order.
  static std::vector<std::weak_ptr<Root>>& all();

  // Before a call of the root: where units were added below it, or parameters frozen or thawed,
  // since the last one, slices and slots are made anew. Collective then.
  // Throws: ContractError where backward may still come for a forward before.
  void follow(nn::Module& module);
  // Throws: ContractError, saying `change`, there. The forwards of others are forgotten.
  void expect_covered(const std::string& change);
  // Its units have no root any more, and are closed.
  void dismiss();

  const Device& device() const { return group_->device(); }
  // Of the roots that live on this rank, 1 for one alone: it tells apart units of the same names.
  int number() const noexcept { return number_; }
  // In order of the module tree, then slices. Those that are gone are null.
  const std::vector<std::weak_ptr<Unit>>& units() const noexcept { return units_; }
  BackwardOrder& backward() noexcept { return backward_; }
  ShardPlan describe() const;
  // Whether its module has been called, or follow_slots_of has.
  bool has_run() const noexcept { return has_run_; }
  // Before the first step: slots as in those of `planned`, which has the same units in a world
  // without peers. Collective. Throws: ContractError, see shard_plan.
  void follow_slots_of(Root& planned);
  ShardCounters counters() const;
  void count_gather() noexcept { ++counters_.gathers; }
  void count_reduction(bool all_reduces) noexcept {
    ++counters_.reductions;
    if (all_reduces) ++counters_.all_reduces;
  }
  // The ranks among which a unit's parameters stay after forward; null without `Reshard::to`.
  // Collective over the world where they are asked for first.
  const RankGroup* neighbours(Reshard reshard);
  // From here on a unit may be open, or gathered, between two forwards of the root.
  void expect_open_units() noexcept { may_hold_units_ = true; }
  // Closes those that an update has made stale, so that their slots are not in the way of others.
  void close_stale_units();

  // --- calls ---
  // The root is called, or another unit without it. `forwards`: the ends of its last calls.
  void begin_forward(std::vector<Event>& forwards, bool is_root);
  // Around a call of any unit. end_call returns whether no other runs any more; end_rounds or
  // abandon_rounds follows then.
  void begin_call() noexcept { ++running_calls_; }
  bool is_in_call() const noexcept { return running_calls_ > 0; }
  bool end_call() noexcept { return --running_calls_ == 0; }
  // The first call of a round of a list, which the end of the outermost call ends, too.
  void begin_round(int unit);
  const char* name_of_gather(const UnitShards& of) const {
    return rounds_.empty() ? of.gather_name() : name_in_rounds(of);
  }
  void end_rounds();
  void abandon_rounds() noexcept;

  // --- after a failure ---
  // Closes every unit, and drops all gradients. What forward has left can't go backward any more.
  void reset();
  // All ranks go on.
  void resume() noexcept { recovery_count_ = device_.recoveries(); }
  // False: its world has recovered without it.
  bool is_valid() const noexcept { return recovery_count_ == device_.recoveries(); }
  // Throws: ContractError, naming the unit, where it is not.
  void expect_valid(const std::string& unit) const;
  // Whether it is as all ranks made it, whatever they have done since.
  bool is_as_made() const noexcept { return slots_->is_as_made(); }
  // Its units have no root again, as before the first step.
  void dissolve() noexcept;

 private:
  Root() = default;
  void follow_masks(nn::Module& module);
  // Without slices and slots.
  void take_down();
  int number_of(const Unit& unit) const;  // Throws: ContractError for one of another root
  // Slices and slots, by what is trainable now.
  void lay_out(nn::Module& module);
  // Collective over the mesh. Throws: ContractError, on every rank, where units differ.
  void expect_alike() const;
  const char* name_in_rounds(const UnitShards& of) const;  // with lists that wait for modules
  void take_number();  // the same on all ranks of the mesh; likewise collective
  void tell_sizes() const;
  void make_replicas();
  void make_host_link();
  void make_gradients();
  const DeviceMesh& mesh() const;
  // The parameters that units stream become units of their own, a slice each.
  void cut_streamed(std::int64_t bytes);
  // What slots are planned from before a program has made a step.
  std::vector<AssumedCall> assumed_calls(nn::Module& module) const;
  // Of each unit, as the program has it now.
  std::vector<UnitNeeds> needs() const;
  std::shared_ptr<Unit> unit(int number) const {
    return units_[static_cast<std::size_t>(number)].lock();
  }

  int number_ = 1;
  const RankGroup* group_ = nullptr;  // that shards
  Device device_ = Device::meta();
  std::uint64_t recovery_count_ = 0;  // Device::recoveries() since when its units are in use
  std::vector<std::weak_ptr<Unit>> units_;
  std::size_t modules_ = 0;          // how many are no slices
  std::uint64_t registrations_ = 0;  // when they were last looked for
  std::vector<AssumedCall> calls_;   // of a step without a program
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Replicas> replicas_;             // of a hybrid mesh
  std::unique_ptr<HostLink> host_link_;            // of what is offloaded
  std::unique_ptr<SymmetricGradients> gradients_;  // where windows are
  std::map<int, const RankGroup*> neighbours_;
  ShardCounters counters_;  // of collectives
  bool may_hold_units_ = false, has_run_ = false;

  int running_calls_ = 0;
  std::vector<int> rounds_;  // of which units rounds have begun since the outermost call did
  int forwards_ahead_ = 2;
  BackwardOrder backward_{*this};
};

}  // namespace tessera::shard
