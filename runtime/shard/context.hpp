// What the units under one root share: their slots, what happens to a unit in backward,
// and the end of a pass.
//
// Note [One order on every rank]
// All ranks call the same units in the same order in forward, and backward goes back along these
// calls (autograd/node.hpp, Region): it enters and leaves them in mirrored order, and to enter one
// is to gather, to leave it to reduce. So all ranks issue the same collectives in the same order,
// whatever their graphs have reached. A branch that one rank does not use, prefetch depth 1:
//
//   forward, both    root( a( ) b( ) )          rank 1: loss = f(x), b's result is not in it
//
//   rank 0                                      rank 1
//   node of the loss is due  enter root         the same
//                            gather b
//   nodes of b are due       enter b, gather a  node of f is due: all steps before it
//   nodes of f are due       leave b, reduce b    enter b, gather a, leave b, reduce b (zeros)
//   nodes of a are due       enter a            nodes of a are due: enter a
//   the pass ends            leave a, reduce a  the same
//                            leave root
//
// Which forwards a pass goes back along is the program's: those that it reaches, and those whose
// graphs are gone. A rank that leaves one out while its graph is there says skip_backward.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "runtime/shard/host_link.hpp"
#include "runtime/shard/replicas.hpp"
#include "runtime/shard/slots.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"

namespace tessera::shard {

class Unit;
struct BackwardNeeds;

class Context : public std::enable_shared_from_this<Context> {
 public:
  // Makes the units below `root`, which is one, share a context. Collective: allocates their slots.
  static void build(nn::Module& root);

  // Before a call of the root: where parameters were frozen or thawed since the last one, slices
  // and slots are made anew. Collective then.
  // Throws: ContractError where backward may still come for a forward before.
  void follow_masks(nn::Module& root);

  const Device& device() const { return group_->device(); }
  // Of the roots that live on this rank, 1 for one alone: it tells apart units of the same names.
  int number() const noexcept { return number_; }
  ShardPlan plan() const;
  // Whether its root has been called, or follow_plan has.
  bool has_run() const noexcept { return has_run_; }
  // Before the first step: slots as in those of `planned`, which has the same units in a world
  // without peers. Collective. Throws: ContractError, see shard_plan.
  void follow_plan(Context& planned);
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
  // Around a call of any unit. end_call returns whether no other runs any more; end_rounds or
  // abandon_rounds follows then.
  void begin_call() noexcept { ++running_calls_; }
  bool is_in_call() const noexcept { return running_calls_ > 0; }
  bool end_call() noexcept { return --running_calls_ == 0; }
  // The first call of a round of a list, which the end of the outermost call ends, too.
  void begin_round(int unit);
  const char* name_of_gather(const UnitShards& of) const;  // with the lists that wait for modules
  void end_rounds();
  void abandon_rounds() noexcept;

  // --- forward ---
  // The root is called, or another unit without it. `forwards`: the ends of its last calls.
  void begin_forward(std::vector<Event>& forwards, bool is_root);

  // --- backward ---
  // A call of the unit: it is open on return, if its parameters are needed, and the gathers of
  // those that backward enters next are queued.
  void enter(Unit& unit, const BackwardNeeds& needs);
  // Reduces what its calls may have given and closes the unit, unless it is entered by a call
  // around this one, or others of the same round come.
  void leave(Unit& unit, const BackwardNeeds& needs);
  // The way back along a forward of the root is over: units that it has left open are closed.
  void end_of_root_backward();
  // After each reduce-scatter, which has ended when `event` has.
  void on_reduced(const Event& event) { reduced_ = event; }

  // --- the pass ---
  // Asks for end_of_root_backward at the end of the running pass.
  void schedule_end();
  // The number of the backward pass that runs or ran last.
  std::uint64_t pass() const noexcept { return pass_; }

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
  // Its units have no context again, as before the first step.
  void dissolve() noexcept;

 private:
  Context() = default;
  // Slices and slots, by what is trainable now.
  void lay_out(nn::Module& root);
  // Collective over the mesh. Throws: ContractError, on every rank, where units differ.
  void expect_alike() const;
  void take_number();  // the same on all ranks of the mesh; likewise collective
  void make_replicas();
  void make_host_link();
  const DeviceMesh& mesh() const;
  // The parameters that units stream become units of their own, a slice each.
  void cut_streamed(std::int64_t bytes);
  std::vector<AssumedCall> assumed_calls(nn::Module& root) const;
  // Of each unit, as the program has it now.
  std::vector<UnitNeeds> needs() const;
  std::shared_ptr<Unit> unit(int number) const {
    return units_[static_cast<std::size_t>(number)].lock();
  }
  void prefetch(Unit& unit, int depth);
  bool call_ends_next() const;
  void recover() noexcept;

  // Held by the running pass. When it goes and its end has not come, the pass has failed.
  struct Pass {
    std::shared_ptr<Context> context;
    ~Pass() {
      if (context->in_pass_) context->recover();
    }
  };

  int number_ = 1;
  const RankGroup* group_ = nullptr;  // that shards
  Device device_ = Device::meta();
  std::uint64_t recovery_count_ = 0;        // Device::recoveries() since when its units are in use
  std::vector<std::weak_ptr<Unit>> units_;  // in order of the module tree, then slices
  std::size_t modules_ = 0;                 // how many are no slices
  std::vector<AssumedCall> calls_;          // of a step without a program
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Replicas> replicas_;   // of a hybrid mesh
  std::unique_ptr<HostLink> host_link_;  // of what is offloaded
  std::map<int, const RankGroup*> neighbours_;
  ShardCounters counters_;  // of collectives
  bool may_hold_units_ = false, has_run_ = false;

  int running_calls_ = 0;
  std::vector<int> rounds_;  // of which units rounds have begun since the outermost call did
  int forwards_ahead_ = 2;
  std::vector<Unit*> entered_;  // from the outermost
  std::uint64_t pass_ = 0;
  bool in_pass_ = false;
  Event reduced_;  // of the last reduction
};

}  // namespace tessera::shard
