// What a fused update of a flat array reads beside it, as plain tables on the device, and the
// library's own updates by name.
//
//   FlatGroup of a unit, f32   │ wq ─────────────│ wk ────────│·│ norm ──│···│   · padding
//   FlatSegment each           │ [begin, end)    │            │ │        │
//   arrival count each         │ 1               │ 0: skipped │ │ 1      │
//
// The gradient has no frozen parameters, and an optimizer's moments are of its own alone, so a
// segment begins at an offset of its own in each of the three arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tessera/device/workers.hpp"

namespace tessera::kernels {

// Elements [begin, end) of the values: one parameter's shard. Element i has its gradient at
// i + gradient_shift and its moments at i + moment_shift, both multiples of 4. Skipped where
// counts[count_index] is 0, which is when no rank had a gradient; never for a negative count_index.
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
// threads of `exec`. `counts` may be null: nothing is skipped. For bodies on the CPU.
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

// What changes with every step, for the library's updates; each reads what its formula names.
// bias_correction_i = 1 - beta_i^step.
struct UpdateScalars {
  float lr, beta1, beta2, eps, bias_correction1, bias_correction2, grad_scale, momentum;
};
static_assert(sizeof(UpdateScalars) == 32 && std::is_trivially_copyable_v<UpdateScalars>);

inline constexpr int kMostMoments = 3;       // arrays of state that an update may have
inline constexpr int kMostScalarBytes = 88;  // of per-step scalars

}  // namespace tessera::kernels
