// Positions ordered by id, along which a GPU adds rows up: embedding_backward and index_add.
//
//   ids      7  3  7  9  3  7                          order    1  4 │ 0  2  5 │ 3
//   rows     a  b  c  d  e  f                          sums     b + e, a + c + f, d
//
// The ordered rows are cut into pieces of kRowsOfPiece, whatever their ids. The rows of an id
// within a piece are added in order, in f32 (f64 where either side is f64, integers modulo 2^64).
// The sum of the piece in which the id begins is added to the table, scaled, and then, also in
// order, the sum of the sums of the others: bits depend on the operands alone, and no id keeps a
// block busy for long.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

inline constexpr std::int64_t kRowsOfPiece = 64;
inline constexpr std::int64_t kIdsOfBlock = 2048, kDigitBits = 9;  // of a pass of the sort

// order[k] = the position of the id that comes k-th: ascending, of equal ids the first first, those
// outside [0, n) behind all others. ids are i32 or i64 [count]; count and n are below 2^31.
// `workspace` has order_workspace_bytes() bytes, 16-byte aligned; the CPU needs none.
struct OrderByIdArgs {
  std::int32_t* order;
  const void* ids;
  void* workspace;
  std::int64_t count, n;
  DType id_dtype;
};
constexpr std::int64_t blocks_of_ids(std::int64_t count) {
  return (count + kIdsOfBlock - 1) / kIdsOfBlock;
}
constexpr std::int64_t order_workspace_bytes(std::int64_t count) {
  return 2 * 8 * count + blocks_of_ids(count) * (std::int64_t{4} << kDigitBits);
}
// Two of each digit of n, which stands for the ids that are outside.
constexpr int launches_of(const OrderByIdArgs& a) {
  const std::int64_t bits = std::bit_width(static_cast<std::uint64_t>(a.n));
  return static_cast<int>(2 * std::max<std::int64_t>(1, (bits + kDigitBits - 1) / kDigitBits));
}
static_assert(order_workspace_bytes(8192) == (16 + 1) * 8192);

constexpr std::int64_t pieces_of(std::int64_t count) {
  return (count + kRowsOfPiece - 1) / kRowsOfPiece;
}
// What embedding_backward and index_add need on a GPU, 16-byte aligned: a sum of each piece.
constexpr std::int64_t sums_workspace_bytes(std::int64_t outer, std::int64_t count,
                                            std::int64_t cols, DType from, DType to) {
  const bool wide = from == DType::f64 || to == DType::f64 || !is_floating(to);
  return pieces_of(count) <= 1 ? 0 : outer * pieces_of(count) * cols * (wide ? 8 : 4);
}
static_assert(sums_workspace_bytes(1, 8192, 768, DType::bf16, DType::f32) == 128 * 768 * 4);

constexpr int launches_of_sums(std::int64_t count) { return pieces_of(count) > 1 ? 2 : 1; }

}  // namespace tessera::kernels
