// What collectives do with their peers' memory: add it up, or copy it. Plain functions on one
// thread, called from the bodies of collectives after all inputs are ready.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

// out[i] = inputs[0][i] + inputs[1][i] + ... + inputs[n_inputs - 1][i], added in this order, so
// that every rank that adds the same inputs has the same bits. 16-bit floats add in f32 and round
// once; integers wrap; boolean is "or". n_inputs == 0 writes zeros. `out` may be one of the inputs,
// at the same address; it is written once, block by block.
void reduce_peers(void* out, const void* const* inputs, int n_inputs, std::int64_t count,
                  DType dtype);

// out[i] = the largest of inputs[..][i]; NaN where any is NaN.  Requires: n_inputs >= 1. `out` as
// above.
void max_peers(void* out, const void* const* inputs, int n_inputs, std::int64_t count, DType dtype);

// Copies `size_bytes` bytes; the ranges do not overlap unless they are equal.
void copy_bytes(void* out, const void* in, std::size_t size_bytes);

}  // namespace tessera::kernels
