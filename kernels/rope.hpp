// Rotary position embedding, half rotation (Hugging Face's convention).
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
//
//   y[.., i]       = x[.., i] cos[p, i] - x[.., i + D/2] sin[p, i]      i in [0, D/2)
//   y[.., i + D/2] = x[.., i + D/2] cos[p, i] + x[.., i] sin[p, i]      p = t + position
//
// The tables cos and sin are f32 [positions, D/2]: cos[p, i] = cos(p theta^(-2i/D)), computed in
// f64 and rounded.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// x and y are [B, T, H, D], D even and contiguous, the other strides in elements. `inverse` rotates
// the other way: the derivative. y may be x with the same strides. t + position stays below the
// tables' length.
struct RopeArgs {
  void* y;
  const void* x;
  const float *cos, *sin;
  std::int64_t x_strides[3], y_strides[3];  // of b, t, h
  std::int32_t position;
  std::int32_t batch, length;
  std::uint16_t heads, head_dim;
  DType dtype;
  bool inverse;
};

struct RopeTableArgs {
  float *cos, *sin;  // [positions, head_dim / 2]
  std::int64_t positions, head_dim;
  double theta;
};

}  // namespace tessera::kernels
