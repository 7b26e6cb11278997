// Fused updates of one flat f32 array per unit, cut into segments (one per parameter shard), and
// gradient clipping.
//
// What changes every step lies on the device: `UpdateScalars`, written before the update, and
// arrival counts, which say whether a parameter has a gradient at all. A segment whose count is 0
// is skipped: parameter and moments stay. Elements that no segment covers (padding) are never
// touched.
#pragma once

#include "kernels/kernel.hpp"
#include "tessera/kernels/updates.hpp"

namespace tessera::kernels {

// values, moments = op(values, g, moments) in one pass, with
//   g = grad_scale * gradient * (clip ? *clip : 1)
// Formulas: tessera/kernels/update_formulas.hpp. Null moments: nothing is kept (sgd without
// momentum).
struct UpdateArgs {
  float* values;
  float* moments[kMostMoments];
  const float* gradient;
  const FlatSegment* segments;  // device memory, sorted, disjoint
  const float* counts;          // null: every segment has its gradient
  const UpdateScalars* scalars;
  const float* clip;  // a device factor on the gradient, or null
  std::int32_t segment_count;
  UpdateOp op;
};

// *norm = sqrt(*sumsq) and *coefficient = min(1, max_norm / (*norm + 1e-6)), as PyTorch clips.
// Either may be null. A NaN or infinite sum gives a NaN coefficient or 0, as the formula says.
struct ClipArgs {
  float *coefficient, *norm;
  const void* sumsq;  // f32 or f64
  double max_norm;
  DType dtype;  // of sumsq
};

// data[i] *= *factor; nothing is touched when the factor is 1.
struct ScaleFlatArgs {
  float* data;
  const float* factor;
  std::int64_t count;
};

// out[i] = values[i], 32-bit words: how the scalars of a step reach the device. They travel with
// the call.
struct PutScalarsArgs {
  void* out;
  std::int32_t count;
  std::uint32_t values[kMostScalarBytes / 4];
};

}  // namespace tessera::kernels
