#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

// Ids of [0, vocab), some outside.
Operand& ids_of(Case& c, DType dtype, std::int64_t count, std::int64_t vocab) {
  Operand& ids = c.input(dtype, count, 0, static_cast<double>(vocab - 1));
  if (count > 3) {
    ids.set(1, -1);
    ids.set(3, static_cast<double>(vocab));
  }
  return ids;
}

void forward(Case& c, DType dtype, DType id_dtype, std::int64_t count, std::int64_t vocab,
             std::int64_t cols, std::int64_t shift = 0) {
  const std::int64_t bytes = shift * static_cast<std::int64_t>(size_bytes(dtype));
  Operand& table = c.input(dtype, vocab * cols, -100, 100, bytes);
  Operand& ids = ids_of(c, id_dtype, count, vocab);
  Operand& out = c.output(dtype, count * cols, bytes);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.embedding({.out = out.at(side),
                 .table = table.at(side),
                 .ids = ids.at(side),
                 .count = count,
                 .vocab = vocab,
                 .cols = cols,
                 .dtype = dtype,
                 .id_dtype = id_dtype},
                exec);
  });
  c.equal(out);
}

struct Sizes {
  std::int64_t count, vocab, cols, shift = 0;
  bool accumulate = false;
  DType id_dtype = i64;
};

// Both sides add in one order and round at each addition; a scale of a power of two makes products
// exact, fused into the sum or not: the same bits.
void backward(Case& c, DType dtype, DType grad_dtype, const Sizes& s) {
  constexpr double scale = 0.5;
  const auto shift = [&](DType d) { return s.shift * static_cast<std::int64_t>(size_bytes(d)); };
  Operand& dy = c.input(dtype, s.count * s.cols, -2, 2, shift(dtype));
  Operand& ids = ids_of(c, s.id_dtype, s.count, s.vocab);
  Operand& table = s.accumulate ? c.updated(grad_dtype, s.vocab * s.cols, -2, 2, shift(grad_dtype))
                                : c.output(grad_dtype, s.vocab * s.cols, shift(grad_dtype));
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.embedding_backward({.d_table = table.at(side),
                          .dy = dy.at(side),
                          .ids = ids.at(side),
                          .count = s.count,
                          .vocab = s.vocab,
                          .cols = s.cols,
                          .scale = scale,
                          .dtype = dtype,
                          .grad_dtype = grad_dtype,
                          .id_dtype = s.id_dtype,
                          .accumulate = s.accumulate},
                         exec);
  });
  c.equal(table);
}

}  // namespace

TESSERA_CASE("embedding", "rows by id, outside ones are NaN or 0") {
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
    for (const DType id_dtype : {i32, i64})
      for (const std::int64_t cols : {1, 3, 8, 64, 1000})
        forward(c, dtype, id_dtype, cols == 1000 ? 5 : 37, 11, cols);
  for (const DType dtype : {f32, bf16, boolean}) forward(c, dtype, i32, 9, 5, 64, 1);
  forward(c, f32, i64, 3, 2, 5000);
  forward(c, f32, i64, 0, 2, 4);
  forward(c, f32, i64, 4, 2, 0);
}

TESSERA_CASE("embedding", "gradient of the table, in the order of the ids") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const DType grad_dtype : {f32, bf16, f16, f64})
      for (const bool accumulate : {false, true}) {
        backward(c, dtype, grad_dtype, {20, 7, 12, 0, accumulate});
        backward(c, dtype, grad_dtype, {20, 7, 5, 0, accumulate, i32});
      }
  for (const bool accumulate : {false, true}) {
    backward(c, bf16, f32, {9, 5, 64, 1, accumulate});
    backward(c, f32, f32, {0, 3, 4, 0, accumulate});
    backward(c, f32, f32, {3, 1, 4100, 0, accumulate});  // two blocks of columns
  }
  backward(c, f32, f32, {70, 1, 3});  // one row gets all
}

TESSERA_CASE("embedding", "more ids than a block reads between barriers") {
  backward(c, bf16, f32, {2048 + 5, 500, 4});
  backward(c, f32, f32, {2048, 999, 1});
}
