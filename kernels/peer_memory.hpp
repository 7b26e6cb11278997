// What collectives do with their peers' memory: add it up, or copy it. Called from the bodies of
// collectives after all inputs are ready: on the CPU on the calling thread, elsewhere queued.
//
// Peers are ranks that share a device or the host's memory, or on devices that this one reaches, so
// that their pointers are valid here. A copy needs no reach.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel.hpp"

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

// reduce_peers and max_peers as kernels. `inputs` is an array on the host, read during the call and
// not later: it may change as soon as the call returns. Outputs and inputs are aligned for `dtype`.
enum class PeersOp : std::uint8_t { sum, max };
struct PeersArgs {
  void* out;
  const void* const* inputs;
  std::int64_t count;
  std::int32_t n_inputs;
  DType dtype;
  PeersOp op;
};

// copy_bytes as a kernel. Either side may be memory of the host that the device can read or write.
struct CopyArgs {
  void* out;
  const void* in;
  std::int64_t bytes;
};

// Copies that do not touch each other's outputs, at the cost of one launch. `copies` is an array on
// the host, read during the call and not later.  Requires: count <= kMostCopies.
inline constexpr std::int32_t kMostCopies = 128;
struct CopiesArgs {
  const CopyArgs* copies;
  std::int32_t count;
};

}  // namespace tessera::kernels
