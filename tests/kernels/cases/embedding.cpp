// Rows of a table by id, and the gradient of the table.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "tests/kernels/ordered.hpp"

namespace kernel_test {
namespace {

struct Ids {
  Operand& operand;
  std::int64_t vocab;

  // Of [0, vocab), some outside.
  Ids(Case& c, DType dtype, std::int64_t count, std::int64_t rows)
      : operand(c.input(dtype, count, 0, static_cast<double>(rows - 1))), vocab(rows) {
    if (count <= 4) return;
    operand.set(1, -1);
    operand.set(3, static_cast<double>(vocab));
  }
  // -1 where the table has no such row.
  std::int64_t at(std::int64_t i) const {
    const auto id = static_cast<std::int64_t>(operand.get(i));
    return id >= 0 && id < vocab ? id : -1;
  }
};

void check_embedding(Case& c, DType dtype, DType id_dtype, std::int64_t count, std::int64_t vocab,
                     std::int64_t cols, bool shifted = false, bool is_part = false) {
  Operand& table = c.input(dtype, vocab * cols, -100, 100, shift_of(dtype, shifted));
  const Ids ids(c, id_dtype, count, vocab);
  Operand& out = is_part ? c.updated(dtype, count * cols, -9, 9, shift_of(dtype, shifted))
                         : c.output(dtype, count * cols, shift_of(dtype, shifted));
  std::vector<double> before;
  for (std::int64_t i = 0; is_part && i < out.size(); ++i) before.push_back(out.get(i));
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.embedding({.out = out.at(side),
                 .table = table.at(side),
                 .ids = ids.operand.at(side),
                 .count = count,
                 .vocab = vocab,
                 .cols = cols,
                 .dtype = dtype,
                 .id_dtype = id_dtype,
                 .is_part = is_part},
                exec);
  });
  const double missing = is_floating(dtype) ? std::numeric_limits<double>::quiet_NaN() : 0;
  for (std::int64_t i = 0; i < out.size(); ++i) {
    const std::int64_t id = ids.at(i / cols);
    const bool is_left = is_part && ids.operand.get(i / cols) == -1;
    c.near(out, i,
           is_left  ? before[static_cast<std::size_t>(i)]
           : id < 0 ? missing
                    : table.get(id * cols + i % cols),
           0);
  }
  c.next();
}

struct TableSizes {
  std::int64_t count, vocab, cols;
  bool accumulate = false, shifted = false;
  DType id_dtype = i64;
  std::int64_t same = 0;  // the last ids are 0
};

// Gradients are whole numbers, and half of each is added: in whatever order, no sum of up to 127
// rounds in bf16, nor one of up to 2^23 in f32. Equal to the bit.
void check_embedding_backward(Case& c, DType dtype, DType grad_dtype, const TableSizes& s) {
  constexpr double scale = 0.5;
  const std::int64_t size = s.vocab * s.cols, shift = shift_of(grad_dtype, s.shifted);
  Operand& dy = c.input(dtype, s.count * s.cols, -2, 2, shift_of(dtype, s.shifted));
  for (std::int64_t i = 0; i < dy.size(); ++i) dy.set(i, std::round(dy.get(i)));
  const Ids ids(c, s.id_dtype, s.count, s.vocab);
  for (std::int64_t i = s.count - s.same; i < s.count; ++i) ids.operand.set(i, 0);
  Operand& table =
      s.accumulate ? c.updated(grad_dtype, size, -2, 2, shift) : c.output(grad_dtype, size, shift);
  for (std::int64_t i = 0; s.accumulate && i < size; ++i) table.set(i, std::round(table.get(i)));
  const ById by_id(c, s.count, sums_workspace_bytes(1, s.count, s.cols, dtype, grad_dtype));
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    by_id.find_order(k, side, exec, ids.operand, s.vocab);
    k.embedding_backward({.d_table = table.at(side),
                          .dy = dy.at(side),
                          .ids = ids.operand.at(side),
                          .count = s.count,
                          .vocab = s.vocab,
                          .cols = s.cols,
                          .scale = scale,
                          .dtype = dtype,
                          .grad_dtype = grad_dtype,
                          .id_dtype = s.id_dtype,
                          .accumulate = s.accumulate,
                          .order = by_id.order.at<std::int32_t>(side),
                          .workspace = by_id.workspace.at(side)},
                         exec);
  });
  std::vector<double> sums(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; s.accumulate && i < size; ++i)
    sums[static_cast<std::size_t>(i)] = table.get(i);
  for (std::int64_t i = 0; i < dy.size(); ++i)
    if (const std::int64_t id = ids.at(i / s.cols); id >= 0)
      sums[static_cast<std::size_t>(id * s.cols + i % s.cols)] += scale * dy.get(i);
  for (std::int64_t i = 0; i < size; ++i) c.near(table, i, sums[static_cast<std::size_t>(i)], 0);
  c.next();
}

}  // namespace

TESSERA_CASE("embedding", "rows by id, outside ones are NaN or 0") {
  for (const DType dtype : kAll)
    for (const DType id_dtype : {i32, i64})
      for (const std::int64_t cols : {1, 3, 8, 64, 1000})
        check_embedding(c, dtype, id_dtype, cols == 1000 ? 5 : 37, 11, cols);
  for (const DType dtype : {f32, bf16, boolean}) check_embedding(c, dtype, i32, 9, 5, 64, true);
  for (const DType dtype : {f32, bf16, i64})
    for (const std::int64_t cols : {5, 64})
      check_embedding(c, dtype, i32, 37, 11, cols, false, true);
  check_embedding(c, bf16, i64, 403, 11, 37);
  check_embedding(c, f32, i64, 3, 2, 5000);
  check_embedding(c, f32, i64, 0, 2, 4);
  check_embedding(c, f32, i64, 4, 2, 0);
}

TESSERA_CASE("embedding", "gradient of the table") {
  for (const DType dtype : kFloats)
    for (const DType grad_dtype : kFloats)
      for (const bool accumulate : {false, true}) {
        check_embedding_backward(c, dtype, grad_dtype, {20, 7, 12, accumulate});
        check_embedding_backward(c, dtype, grad_dtype, {20, 7, 5, accumulate, false, i32});
      }
  for (const bool accumulate : {false, true}) {
    check_embedding_backward(c, bf16, f32, {9, 5, 64, accumulate, true});
    check_embedding_backward(c, f16, f16, {210, 70, 300, accumulate});  // three tasks of columns
    check_embedding_backward(c, f32, f32, {0, 3, 4, accumulate});
    check_embedding_backward(c, f32, f32, {3, 1, 4100, accumulate});  // two blocks of columns
  }
  check_embedding_backward(c, f32, f32, {70, 1, 3});  // one row gets all
}

TESSERA_CASE("embedding", "where the parts of slices have the rows of a table") {
  struct Cut {
    std::int64_t vocab, chunk, begin, rows, part_rows;
    std::int32_t slices, parts;
  };
  for (const DType id_dtype : {i32, i64})
    for (const Cut& cut : {Cut{10, 3, 1, 2, 8, 1, 1},
                           {10, 3, 0, 1, 4, 3, 1},
                           {10, 3, 0, 2, 3, 2, 3},
                           {10, 10, 0, 10, 4, 1, 3},
                           {1000, 251, 100, 50, 60, 4, 4},
                           {1000, 251, 100, 50, 60, 2, 4},
                           {1, 1, 0, 1, 1, 1, 1}}) {
      constexpr std::int64_t count = 700;
      Operand& ids = c.input(id_dtype, count, -2, static_cast<double>(cut.vocab + 1));
      Operand& out = c.output(i32, cut.slices * cut.parts * count);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.locate({.out = out.at(side),
                  .ids = ids.at(side),
                  .count = count,
                  .vocab = cut.vocab,
                  .chunk = cut.chunk,
                  .begin = cut.begin,
                  .rows = cut.rows,
                  .part_rows = cut.part_rows,
                  .slices = cut.slices,
                  .parts = cut.parts,
                  .ignored = -1,
                  .id_dtype = id_dtype},
                 exec);
      });
      for (std::int64_t slice = 0; slice < cut.slices; ++slice) {
        // The rows of the slice, written out.
        std::map<std::int64_t, std::int64_t> rows;
        std::int64_t row = 0;
        const std::int64_t begin = cut.begin + slice * cut.rows,
                           end = std::min(begin + cut.rows, cut.chunk);
        for (std::int64_t chunk = 0; chunk < cut.vocab; chunk += cut.chunk)
          for (std::int64_t r = begin; r < end; ++r, ++row)
            if (chunk + r < cut.vocab) rows[chunk + r] = row;
        for (std::int64_t part = 0; part < cut.parts; ++part)
          for (std::int64_t i = 0; i < count; ++i) {
            const auto id = static_cast<std::int64_t>(ids.get(i));
            const bool is_id = id >= 0 && id < cut.vocab;
            const auto found = rows.find(id);
            const bool is_here = found != rows.end() && found->second / cut.part_rows == part;
            c.near(out, (slice * cut.parts + part) * count + i,
                   id == -1   ? -1
                   : !is_id   ? -2
                   : !is_here ? -1
                              : static_cast<double>(found->second % cut.part_rows),
                   0);
          }
      }
      c.next();
    }
}

TESSERA_CASE("embedding", "ids that fill several blocks, and rows of many pieces") {
  check_embedding_backward(c, bf16, f32, {2048 + 5, 500, 4});
  check_embedding_backward(c, f32, f32, {2048, 999, 1});
  // Whole pieces, more of them than lanes, one more row and one less.
  for (const std::int64_t same : {63, 64, 65, 128, 129, 2111})
    for (const std::int64_t before : {0, 1, 63, 64, 65})
      check_embedding_backward(c, bf16, f32, {before + same, 9, 8, false, false, i32, same});
  check_embedding_backward(c, f32, bf16, {70, 3, 16, true, false, i32, 66});
  check_embedding_backward(c, f64, f64, {200, 3, 1032, true, false, i64, 190});
}

// A sum of k rows in pieces, of real numbers: k + 1 roundings to f32 of at most the amounts' sum on
// the way, in any order. Into 16 bits the CPU rounds once more at each, a GPU twice.
TESSERA_CASE("embedding", "gradient of the table, of real numbers") {
  for (const DType dtype : {bf16, f32})
    for (const DType grad_dtype : {bf16, f32}) {
      constexpr std::int64_t count = 300, vocab = 3, cols = 24;
      Operand& dy = c.input(dtype, count * cols);
      const Ids ids(c, i32, count, vocab);
      Operand& table = c.updated(grad_dtype, vocab * cols);
      const ById by_id(c, count, sums_workspace_bytes(1, count, cols, dtype, grad_dtype));
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        by_id.find_order(k, side, exec, ids.operand, vocab);
        k.embedding_backward({.d_table = table.at(side),
                              .dy = dy.at(side),
                              .ids = ids.operand.at(side),
                              .count = count,
                              .vocab = vocab,
                              .cols = cols,
                              .scale = 0.3,
                              .dtype = dtype,
                              .grad_dtype = grad_dtype,
                              .id_dtype = i32,
                              .accumulate = true,
                              .order = by_id.order.at<std::int32_t>(side),
                              .workspace = by_id.workspace.at(side)},
                             exec);
      });
      for (std::int64_t row = 0; row < vocab; ++row)
        for (std::int64_t column = 0; column < cols; ++column) {
          const std::int64_t at = row * cols + column;
          double sum = table.get(at), amounts = std::abs(sum);
          int rows = 0;
          for (std::int64_t i = 0; i < count; ++i) {
            if (ids.at(i) != row) continue;
            ++rows;
            sum += 0.3 * dy.get(i * cols + column);
            amounts += std::abs(0.3 * dy.get(i * cols + column));
          }
          const double roundings =
              (rows + 3) * epsilon(f32);  // with the scale's own, and a product's
          const int narrow = c.target().driver == nullptr ? rows : 2;
          c.near(table, at, sum,
                 1.01 * amounts * (roundings + (grad_dtype == bf16 ? narrow * epsilon(bf16) : 0)));
        }
      c.next();
    }
}

TESSERA_CASE("embedding", "positions in the order of their ids, equal ones as they come") {
  for (const DType id_dtype : {i32, i64})
    for (const std::int64_t n : {0, 1, 2, 511, 512, 513, 50304, 300000})
      for (const std::int64_t count : {0, 1, 37, 2048, 5000}) {
        Operand& ids = c.input(id_dtype, count, -2, static_cast<double>(n + 1));
        const ById by_id(c, count, 0);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          by_id.find_order(k, side, exec, ids, n);
        });
        std::vector<std::int64_t> expected(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < expected.size(); ++i)
          expected[i] = static_cast<std::int64_t>(i);
        const auto key = [&](std::int64_t i) {
          const double id = ids.get(i);
          return id >= 0 && id < static_cast<double>(n) ? id : static_cast<double>(n);
        };
        std::stable_sort(expected.begin(), expected.end(),
                         [&](std::int64_t i, std::int64_t j) { return key(i) < key(j); });
        for (std::int64_t i = 0; i < count; ++i)
          c.near(by_id.order, i, static_cast<double>(expected[static_cast<std::size_t>(i)]), 0);
        c.next();
      }
}

}  // namespace kernel_test
