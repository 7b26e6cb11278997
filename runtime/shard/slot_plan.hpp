// Where the slots of a step lie: arithmetic on its uses, which say who takes a slot when. Slots,
// which keeps the uses, says when a plan is made; nothing here knows a device.
//
//   take, give back       forward            backward
//   root, parameters    ├──────────────────────────────────┤      stays open
//   a, parameters       ├──┤                        ├───┤
//   b, parameters      ┄├──┤                ├───┤                 ┄ while the host runs ahead
//   c, parameters           ┄├──────────────┤                     called last: it stays
//   a, gradients                                     ├──┤┄┄┄      ┄ while it is reduced
//   b, gradients                              ├──┤┄┄┄
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::shard {

enum class SlotKind : std::uint8_t { parameters, gradients };

// What is known of a unit.
struct UnitNeeds {
  int parent = -1;  // in the order of the module tree; -1: the root, which comes first
  bool keeps_open = false, may_stay = false;
  std::int64_t gather_bytes = 0;       // 0: needs none
  std::vector<std::int64_t> pieces{};  // of its gradient buffer, bytes
  int prefetch_depth = 1, reductions_in_flight = 1;
};

// One call of a unit, in order of forward.
struct AssumedCall {
  int unit = 0;
  int parent = -1;  // the call around it; -1: the root's, which comes first
  bool is_read_in_backward = true;
  bool is_first = true, is_last = true;  // of its unit, a list of modules
};

// One slot from when it is taken until it is given back. Time counts these events.
struct SlotUse {
  int unit = 0;
  SlotKind kind = SlotKind::parameters;
  std::int64_t bytes = 0;
  std::int64_t begin = 0, end = 0;
  bool is_carried = false;    // it was taken before the step began,
  std::int64_t offset = -1;   // and lies here
  bool ends_forward = false;  // given back by a call that backward comes to, see join_at_turn
  int stays = 0;              // how often it was not given back there
};

struct SlotPlan {
  std::vector<std::int64_t> offsets;  // of each use
  std::int64_t bytes = 0;
  std::int64_t most_alive = 0;  // no plan needs fewer
};
// Places the uses of a step. On the device they last longer than on the host, and are lengthened
// first: a gather begins before its call, as soon as no more than `prefetch_depth` others are
// there; a piece of a gradient buffer goes when `reductions_in_flight` others have been queued for
// reduction, as large as the largest of its unit, less a third of one; the pieces of a unit that
// calls others wait for its end, and go as one.
SlotPlan plan_slots(std::span<const SlotUse> uses, std::span<const UnitNeeds> units);
// Where a call has ended forward, and the next slot that anybody takes is its unit's, for backward,
// the two become one use: what was gathered stays, and no other slot is alive for longer. Not so of
// what was taken before the step, for Slots::stays follows the plan of the step in which it was.
void join_at_turn(std::vector<SlotUse>& uses);
// Who takes what, in which order: equal for steps that one plan serves.
std::uint64_t fingerprint(std::span<const SlotUse> uses);
// The uses of a step that makes these calls, and goes back.
std::vector<SlotUse> assumed_step(std::span<const UnitNeeds> units,
                                  std::span<const AssumedCall> calls);

}  // namespace tessera::shard
