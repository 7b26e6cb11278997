// The plain tables on the device that a fused update reads beside its flat arrays, and the
// library's own updates by name.
//
//   FlatGroup of a unit, f32   │ wq ─────────────│ wk ────────│·│ norm ──│···│   · padding
//   FlatSegment each           │ [begin, end)    │            │ │        │
//   arrival count each         │ 1               │ 0: skipped │ │ 1      │
//
// The gradient has no frozen parameters, and an optimizer's moments are only those of its own
// parameters. So a segment begins at an offset of its own in each of the three arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tessera/device/workers.hpp"

namespace tessera::kernels {

// Elements [begin, end) of the values: one parameter's shard. Element i has its gradient at i +
// gradient_shift, and its moments at i + moment_shift. Both shifts are multiples of 4. The segment
// is skipped if counts[count_index] is 0, because then no rank had a gradient. With a negative
// count_index it never is.
struct FlatSegment {
  std::int64_t begin, end;
  std::int64_t gradient_shift, moment_shift;
  std::int32_t count_index;
  float lr_factor;  // on the learning rate
  float weight_decay;
  std::int32_t unused;
};
static_assert(sizeof(FlatSegment) == 48 && std::is_trivially_copyable_v<FlatSegment>);

// Calls f(segment, begin, end) for ranges that cover all segments but the skipped ones, on the
// threads of `exec`. `counts` may be null: then nothing is skipped. It is for bodies on the CPU.
template <class F>
void for_segments(Exec& exec, const FlatSegment* segments, std::int32_t count, const float* counts,
                  F f) {
  constexpr std::int64_t kGrain = 16384;  // elements: bits do not depend on the threads
  for (std::int32_t s = 0; s < count; ++s) {
    const FlatSegment segment = segments[s];
    if (counts != nullptr && segment.count_index >= 0 && counts[segment.count_index] == 0) continue;
    parallel_for(exec, (segment.end - segment.begin + kGrain - 1) / kGrain, [&](std::int64_t task) {
      const std::int64_t begin = segment.begin + task * kGrain;
      f(segment, begin, std::min(segment.end, begin + kGrain));
    });
  }
}

enum class UpdateOp : std::uint8_t {
#define TESSERA_OP(name, ...) name,
#include "tessera/kernels/updates.def"
};
inline constexpr UpdateOp kUpdates[] = {
#define TESSERA_OP(name, ...) UpdateOp::name,
#include "tessera/kernels/updates.def"
};
constexpr const char* name(UpdateOp op) {
  constexpr const char* names[] = {
#define TESSERA_OP(name, ...) #name,
#include "tessera/kernels/updates.def"
  };
  return names[static_cast<int>(op)];
}

// The scalars of a step, for the library's updates; each reads those that its formula names.
// bias_correction_i = 1 - beta_i^step.
struct UpdateScalars {
  float lr, beta1, beta2, eps, bias_correction1, bias_correction2, grad_scale, momentum, dampening,
      nesterov;  // 1 or 0
};
static_assert(sizeof(UpdateScalars) == 40 && std::is_trivially_copyable_v<UpdateScalars>);

inline constexpr int kMostMoments = 3;       // arrays of state that an update may have
inline constexpr int kMostScalarBytes = 88;  // of per-step scalars

}  // namespace tessera::kernels
