// Optimizer steps over one flat f32 array per unit, cut into segments (one per parameter shard),
// and gradient clipping.
//
// What changes every step lies on the device: `OptimScalars`, updated before the step, and arrival
// counts, which say whether a parameter has a gradient at all. A segment whose count is 0 is
// skipped: parameter and moments stay. Elements that no segment covers (padding) are never touched.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// Per-step scalars. bias_correction_i = 1 - beta_i^step.
struct OptimScalars {
  float lr, beta1, beta2, eps, bias_correction1, bias_correction2, grad_scale, momentum;
};
static_assert(sizeof(OptimScalars) == 32 && std::is_trivially_copyable_v<OptimScalars>);

// Elements [begin, end) of the flat array; skipped where counts[count_index] is 0. A negative
// count_index is never skipped.
struct OptimSegment {
  std::int64_t begin, end;
  std::int32_t count_index;
  float weight_decay;
};
static_assert(sizeof(OptimSegment) == 24 && std::is_trivially_copyable_v<OptimSegment>);

// AdamW as PyTorch defines it (Loshchilov and Hutter, "Decoupled weight decay regularization",
// 2019), in one pass:
//   g = grad_scale * gradient * (clip ? *clip : 1);   p *= 1 - lr weight_decay
//   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//   p -= lr / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
struct AdamWArgs {
  float *parameter, *m, *v;
  const float* gradient;
  const OptimSegment* segments;  // device memory, sorted, disjoint
  const float* counts;           // null: every segment has its gradient
  const OptimScalars* scalars;
  const float* clip;  // a device factor on the gradient, or null
  std::int32_t segment_count;
};

// SGD with momentum as PyTorch defines it, without dampening; a null `buffer` means p -= lr g.
//   g = grad_scale * gradient * (clip ? *clip : 1) + weight_decay p
//   buffer = momentum buffer + g;   p -= lr buffer
struct SgdArgs {
  float *parameter, *buffer;
  const float* gradient;
  const OptimSegment* segments;
  const float* counts;
  const OptimScalars* scalars;
  const float* clip;
  std::int32_t segment_count;
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

// *out = values: how the scalars of a step reach the device. The values travel with the call.
struct PutScalarsArgs {
  OptimScalars* out;
  OptimScalars values;
};

}  // namespace tessera::kernels
