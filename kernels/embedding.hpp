// Embedding: rows of a table by id, and the gradient of the table. Ids are i32 or i64 [count], the
// table [vocab, cols].
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// out[i, :] = table[ids[i], :], any dtype. An id outside [0, vocab) gives a row of NaN (0 for
// integers).
struct EmbeddingArgs {
  void* out;
  const void *table, *ids;
  std::int64_t count, vocab, cols;
  DType dtype, id_dtype;
};

// d_table[v, :] = (accumulate ? old : 0) + scale * sum over i with ids[i] == v of dy[i, :], added
// in the order of i. dy and d_table are floating and may differ in dtype. A 16-bit d_table rounds
// at each addition. Ids outside [0, vocab) add nothing.
struct EmbeddingBackwardArgs {
  void* d_table;
  const void *dy, *ids;
  std::int64_t count, vocab, cols;
  double scale;
  DType dtype, grad_dtype, id_dtype;  // of dy, d_table, ids
  bool accumulate;
};

}  // namespace tessera::kernels
