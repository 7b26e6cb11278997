// Fused cross-entropy of logits [rows, vocab] with integer targets [rows]; no softmax is kept
// between the passes.
//
// Losses, lse and the device scale are f32, or f64 when the logits are f64. A row whose target is
// `ignore_index` has loss 0 and gradient 0. Where the logits are a part of a larger vocabulary
// (`is_part`), a target of -1 lies in another part: its logit counts as 0, and the row's gradient
// has no -1 in it. Any other target outside [0, vocab) gives NaN, in the loss and in the row's
// gradient.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// lse[r] = log(sum(exp(logits[r, :]))), loss[r] = lse[r] - logits[r, target[r]]. Rows of logits lie
// `row_stride` apart.
struct CrossEntropyArgs {
  void *loss, *lse;
  const void *logits, *targets;
  std::int64_t rows, vocab, row_stride;
  std::int64_t ignore_index = -100;
  DType dtype, target_dtype;  // target_dtype is i32 or i64
  bool is_part = false;
};

// d_logits[r, c] = (exp(logits[r, c] - lse[r]) - (c == target[r])) * scale[r * scale_stride] *
// host_scale. scale_stride is 0 (one factor for all rows) or 1 (a gradient per row). d_logits may
// be logits.
struct CrossEntropyBackwardArgs {
  void* d_logits;
  const void *logits, *targets, *lse, *scale;
  double host_scale;
  std::int64_t rows, vocab, row_stride, d_row_stride;
  std::int32_t ignore_index = -100;
  std::int32_t scale_stride;
  DType dtype, target_dtype;
  bool is_part = false;
};

// Both for logits that are all of the vocabulary: the losses, and in place of the logits the
// gradient, of which `scale` is the one factor.
struct CrossEntropyWithGradientArgs {
  void *loss, *logits;
  const void *targets, *scale;
  double host_scale;
  std::int64_t rows, vocab, row_stride;
  std::int32_t ignore_index = -100;
  DType dtype, target_dtype;

  // What it is one kernel for; neither lse is there.
  constexpr CrossEntropyArgs forward() const {
    return {loss,  nullptr,    logits,       targets, rows,
            vocab, row_stride, ignore_index, dtype,   target_dtype};
  }
  constexpr CrossEntropyBackwardArgs backward() const {
    return {logits, logits,     targets,    nullptr,      scale, host_scale, rows,
            vocab,  row_stride, row_stride, ignore_index, 0,     dtype,      target_dtype};
  }
};

// The losses over a whole vocabulary from those over its parts, [parts, rows] each and `dtype`, f32
// or f64: of each row one part has the target, and everywhere else loss and lse are one. A row
// whose target is `ignore_index` has loss 0.
//
//   lse[r] = log(sum over p of exp(lses[p, r])),  loss[r] = lse[r] + sum over p of
//   (losses[p, r] - lses[p, r])
struct CrossEntropyOfPartsArgs {
  void *loss, *lse;
  const void *losses, *lses, *targets;
  std::int64_t rows, parts;
  std::int32_t ignore_index = -100;
  DType dtype, target_dtype;
};

// count[0] = how many targets are not `ignore_index`, but `least` where these are fewer: what a
// mean over rows divides by. `dtype`, of the count, is f32, which is exact below 2^24, or f64.
struct CountTargetsArgs {
  void* count;
  const void* targets;
  std::int64_t rows;
  std::int32_t ignore_index = -100;
  std::int32_t least;
  DType dtype, target_dtype;
};

}  // namespace tessera::kernels
