// The cost that an operation states, for the clock of a plan, predictions and traces. Nothing that
// it does depends on it.
#pragma once

#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera {

// The matrix products of an operation: `batch` times [m, k] by [k, n]. Machines multiply small and
// thin matrices below their best rate, so sizes matter. Attention has [m, k] queries and [n, k]
// keys for each head.
struct Products {
  enum class Kind : std::uint8_t {
    none,
    matrix,
    attention,
    attention_backward,
    ordered_attention_backward,  // the same bits from every run
  };

  Kind kind = Kind::none;
  DType dtype = DType::f32;
  std::int32_t batch = 0, m = 0, n = 0, k = 0;
};

// The cost of an operation, for cost models and reports.
struct Cost {
  double flops = 0;
  double bytes = 0;       // read and written in memory
  double wire_bytes = 0;  // sent and received by this rank
  Products products{};    // that the flops are spent on
  // For a collective: how many ranks take part, and how far apart they are numbered in the world.
  // From this follows how many of them share a machine.
  int ranks = 1, rank_step = 1;
  int kernels = 1;  // that a GPU starts for it; a library's call counts as one
};

}  // namespace tessera
