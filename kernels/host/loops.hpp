// One contiguous loop per elementwise operation and computing type (f32, f64, i32, i64, boolean).
#pragma once

#include <cstdint>

#include "kernels/elementwise.hpp"

namespace tessera::kernels::host {

using UnaryLoop = void (*)(void* out, const void* in, std::int64_t n);
using BinaryLoop = void (*)(void* out, const void* a, const void* b, std::int64_t n);

// The type in which `dtype` is computed: f32 for 16-bit floats, else itself.
constexpr DType compute_dtype(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16 ? DType::f32 : dtype;
}

// The loop of `op` on a computing type, or null where the contract gives it no meaning. `out` may
// be an input.
UnaryLoop unary_loop(UnaryOp op, DType compute);
BinaryLoop binary_loop(BinaryOp op, DType compute);

}  // namespace tessera::kernels::host
