// What an operation says of its cost, for the clock of a plan, predictions and traces: nothing that
// it does depends on it.
#pragma once

#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera {

// The matrix products that an operation consists of: `batch` times [m, k] by [k, n]. Machines
// multiply small and thin matrices at less than their best rate. Attention has [m, k] queries and
// [n, k] keys for each head.
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

// What an operation costs, for cost models and reports.
struct Cost {
  double flops = 0;
  double bytes = 0;       // read and written in memory
  double wire_bytes = 0;  // sent and received by this rank
  Products products{};    // that the flops are spent on
  // Of a collective: how many ranks take part, and how far apart they are numbered in the world,
  // from which follows how many of them share a machine.
  int ranks = 1, rank_step = 1;
  int kernels = 1;  // that a GPU starts for it; what a library starts in a call counts as one
};

}  // namespace tessera
