// Embedding: rows of a table by id, and the gradient of the table. Ids are i32 or i64 [count], the
// table [vocab, cols].
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"
#include "kernels/rows_by_id.hpp"

namespace tessera::kernels {

// out[i, :] = table[ids[i], :], any dtype. Where the table is a part of a larger one (`is_part`),
// an id of -1 lies in another part, and its row of `out` is left as it is. Any other id outside [0,
// vocab) gives a row of NaN (0 for integers).
struct EmbeddingArgs {
  void* out;
  const void *table, *ids;
  std::int64_t count, vocab, cols;
  DType dtype, id_dtype;
  bool is_part = false;
};

// Where the rows of a table lie that is cut in two ways: into chunks of `chunk` rows, and each of
// these, from its row `begin` on, into slices of `rows` rows, the last of which may have fewer. A
// slice has its rows of every chunk, one chunk after the other, and is walked in parts of
// `part_rows`. out [slices, parts, count] (i32): out[s, p, i] = the row of part p of slice s that
// is row ids[i] of the table; -1 where another part has it, -2 for an id outside [0, vocab), but
// for `ignored`, which stays.
struct LocateArgs {
  void* out;
  const void* ids;
  std::int64_t count, vocab, chunk, begin, rows, part_rows;
  std::int32_t slices, parts;
  std::int32_t ignored = -2;
  DType id_dtype;
};

// d_table[v, :] = (accumulate ? old : 0) + scale * sum over i with ids[i] == v of dy[i, :]. dy and
// d_table are floating and may differ in dtype. Ids outside [0, vocab) add nothing. The CPU adds in
// the order of i and rounds to d_table's dtype at each addition; a GPU adds along `order`, which
// has equal ids side by side, as rows_by_id.hpp says, and has sums_workspace_bytes(1, count, cols,
// dtype, grad_dtype) bytes of workspace.
struct EmbeddingBackwardArgs {
  void* d_table;
  const void *dy, *ids;
  std::int64_t count, vocab, cols;
  double scale;
  DType dtype, grad_dtype, id_dtype;  // of dy, d_table, ids
  bool accumulate;
  const std::int32_t* order = nullptr;  // [count], and the workspace: null on the CPU
  void* workspace = nullptr;
};
constexpr int launches_of(const EmbeddingBackwardArgs& a) {
  return launches_of_sums(a.count) + (a.accumulate ? 0 : 1);  // the table is cleared first
}

}  // namespace tessera::kernels
