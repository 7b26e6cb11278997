// What the units under one root share: the arena and its slots, the order of calls, and the end of
// a backward pass.
//
// Note [One order on every rank]
// All ranks call the same units in the same order in forward. Each call for training is written to
// `order_` when it ends, so inner calls stand before the one around them. Backward goes through
// `order_` from the back:
//
//   forward    call a │ call b ( call c ) │        order_: a, c, b
//   backward   enter b ─ enter c ─ leave c ─ leave b ─ enter a ─ leave a
//
// All ranks must issue the same collectives in the same order, also where one rank's graph does not
// reach a call (an unused branch). To skip a call is to issue what a peer issues there: gather, and
// reduce zeros. Three rules say when:
//   Before backward enters a call, it skips every later call that it has not entered.
//   Before it leaves a call, it skips the calls inside that its peers finish first.
//   At the end of the pass it skips what is left.
//
// Two ranks, blocks 1 and 2, prefetch depth 1; the loss of rank 1 does not use block 2:
//
//   rank 0                               rank 1
//   enter root: gather 2                 enter root: gather 2
//   enter 2:    gather 1                 enter 1, skips 2: gather 1,
//   leave 2:    reduce 2                                   reduce 2 (zeros)
//   enter 1, leave 1: reduce 1           leave 1: reduce 1
#pragma once

#include <memory>
#include <vector>

#include "runtime/shard/call.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/memory/slots.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::shard {

class Context : public std::enable_shared_from_this<Context> {
 public:
  // Makes the units below `root`, which is one, share a context. Collective: allocates the
  // symmetric arena.
  static void build(nn::Module& root);
  ~Context();

  const World& world() const noexcept { return *world_; }
  const Device& device() const { return world_->device(); }
  ShardPlan plan() const;
  ShardCounters counters;

  // --- the order of calls ---
  // A call for training has ended, in forward.
  void record_call(const std::shared_ptr<Call>& call);
  // The call's part of backward begins: its unit is open on return, and the gathers of those that
  // backward enters next are queued.
  void enter(UnitRegion& region);
  // The call's part of backward has ended; the caller closes and reduces its unit.
  void leave(const UnitRegion& region);
  // After each reduce-scatter, which has ended when `event` has.
  void on_reduced(const Event& event);

  // --- the pass ---
  // Asks for end_of_backward at the end of the running pass.
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
  // Its units have no context again, as before the first step.
  void dissolve() noexcept;

 private:
  Context() = default;
  void size_slots(int nesting);
  void allocate_slots();
  void skip(Call& call);
  void skip_inside(const Call& call);
  void prefetch(std::size_t position, int depth);
  void end_of_backward();
  void recover() noexcept;

  // Held by the running pass. When it goes and end_of_backward has not run, the pass has failed.
  struct Pass {
    std::shared_ptr<Context> context;
    ~Pass() {
      if (context->in_pass_) context->recover();
    }
  };

  const World* world_ = nullptr;
  Device device_ = Device::meta();
  std::uint64_t recovery_count_ = 0;        // Device::recoveries() since when its units are in use
  std::vector<std::weak_ptr<Unit>> units_;  // in order of the module tree
  std::shared_ptr<SymmetricMemory> arena_;  // of all slots
  std::vector<std::unique_ptr<SlotRing>> rings_;
  int gather_slots_ = 0, reduce_slots_ = 0;
  std::int64_t gather_slot_bytes_ = 0, reduce_slot_bytes_ = 0, resident_bytes_ = 0,
               arena_bytes_ = 0;

  std::vector<std::shared_ptr<Call>> order_;
  std::vector<std::shared_ptr<Forward>> reached_;  // by the running pass
  std::uint64_t pass_ = 0;
  bool in_pass_ = false;
  Event reduced_;  // of the last reduction
};

}  // namespace tessera::shard
