// What the units under one root share: slots, the order of calls, and the end of a backward pass.
//
// Note [One order on every rank]
// All ranks call the same units in the same order in forward, and each call for training leaves its
// place in `order_` when it ends, inner calls before the one around them. Backward visits it from
// the back. When a rank's graph does not reach a call (an unused branch), that rank still issues
// what its peers issue: before a call begins, every later one that has not begun is skipped, which
// gathers and reduces it with zeros; so is, before a call ends, what its peers run inside of it.
//
//   forward    call a │ call b ( call c ) │        order_: a, c, b
//   backward   begin b ─ begin c ─ end c ─ end b ─ begin a ─ end a
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/memory/slots.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::shard {

class Unit;
class UnitRegion;

// One forward for training: an outermost call and the calls inside it. Lives as long as any node of
// it.
struct Forward {
  std::vector<std::weak_ptr<Unit>> opened;  // since it was last reduced, in order of calls
  bool in_pass = false;                     // the running backward has reached it
  std::uint64_t epoch = 0;                  // Device::recoveries() when it was made
};

// One call of a unit for training, and its place in backward.
struct Call {
  std::weak_ptr<Unit> unit;
  std::weak_ptr<Forward> forward;
  std::shared_ptr<const Call> outer;  // the call around it
  bool begun = false;
  bool ends_first = false;  // `outer` has nodes before it in forward: in backward it ends earlier

  bool is_inside(const Call& other) const noexcept { return within(other) != nullptr; }
  bool ends_before(const Call& other) const noexcept {
    const Call* const part = within(other);
    return part && part->ends_first;
  }
  bool is_due() const noexcept {
    const auto f = forward.lock();
    return !begun && f && f->in_pass;
  }

 private:
  // The call directly inside `other` that holds this one, or is it.
  const Call* within(const Call& other) const noexcept {
    for (const Call* c = this; c->outer; c = c->outer.get())
      if (c->outer.get() == &other) return c;
    return nullptr;
  }
};

class Context : public std::enable_shared_from_this<Context> {
 public:
  // Makes the units below `root`, which is one, share a context. Collective: allocates the
  // symmetric arena.
  static void build(nn::Module& root);
  ~Context();

  const World& world() const noexcept { return *world_; }
  const Device& device() const { return world_->device(); }

  // --- the order of calls ---
  // A call for training has ended, in forward.
  void called(const std::shared_ptr<Call>& call);
  // The call's part of backward begins: its unit is open on return, and those before it are on
  // their way.
  void begins(UnitRegion& region);
  void ends(UnitRegion& region);
  // Asks for end_of_backward at the end of the running pass.
  void schedule_end();
  // The number of the backward pass that runs or ran last.
  std::uint64_t pass() const noexcept { return pass_; }
  // After each reduction: later readers of gradients wait for `event`.
  void reduced(const Event& event) { reduced_ = event; }

  // --- after a failure ---
  // Closes every unit, and drops all gradients. What forward has left can't go backward any more.
  void reset();
  // All ranks go on.
  void begin_again() noexcept { epoch_ = device_.recoveries(); }
  // False: its world has recovered without it.
  bool is_current() const noexcept { return epoch_ == device_.recoveries(); }
  // Its units have no context again, as before the first step.
  void dissolve() noexcept;

  ShardPlan plan() const;
  ShardCounters counters;

 private:
  Context() = default;
  void allocate(int nesting);
  void skip(Call& call);
  void skip_inside(const Call& call);
  void prefetch(std::size_t at, int depth);
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
  std::uint64_t epoch_ = 0;                 // Device::recoveries() since when its units are in use
  std::vector<std::weak_ptr<Unit>> units_;  // in order of the module tree
  std::shared_ptr<SymmetricMemory> arena_;
  std::vector<std::unique_ptr<SlotRing>> rings_;
  int gather_slots_ = 0, reduce_slots_ = 0;
  std::int64_t gather_slot_bytes_ = 0, reduce_slot_bytes_ = 0, resident_bytes_ = 0,
               arena_bytes_ = 0;

  std::vector<std::shared_ptr<Call>> order_;
  std::vector<std::shared_ptr<Forward>> reached_;  // by the running pass
  std::uint64_t pass_ = 0;
  bool in_pass_ = false;
  Event reduced_;
};

}  // namespace tessera::shard
