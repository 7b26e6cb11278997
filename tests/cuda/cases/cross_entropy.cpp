// Cross-entropy and its derivative: rows that start anywhere, targets of both types, ignored and
// out of range.
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {f32, bf16, f16, f64};
constexpr int kIgnored = -7;

DType statistics(DType dtype) { return dtype == f64 ? f64 : f32; }
double round_error(DType dtype) { return epsilon(statistics(dtype)); }

struct Setup {
  std::int64_t rows, vocab, row_stride, d_row_stride;
};

// Targets inside the vocabulary, but for an ignored one and two beyond its ends.
Operand& targets_of(Case& c, const Setup& s, DType dtype) {
  Operand& targets = c.input(dtype, s.rows, 0, static_cast<double>(s.vocab - 1));
  if (s.rows > 4) {
    targets.set(1, kIgnored);
    targets.set(2, static_cast<double>(s.vocab));
    targets.set(3, -1);
  }
  return targets;
}

void check_forward(Case& c, const Setup& s, DType dtype, DType target_dtype) {
  Operand &logits = c.input(dtype, s.rows * s.row_stride, -8, 8),
          &targets = targets_of(c, s, target_dtype);
  Operand &loss = c.output(statistics(dtype), s.rows), &lse = c.output(statistics(dtype), s.rows);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.cross_entropy({.loss = loss.at(side),
                     .lse = lse.at(side),
                     .logits = logits.at(side),
                     .targets = targets.at(side),
                     .rows = s.rows,
                     .vocab = s.vocab,
                     .row_stride = s.row_stride,
                     .ignore_index = kIgnored,
                     .dtype = dtype,
                     .target_dtype = target_dtype},
                    exec);
  });
  // Of the sum, relative: exp_fast within 2 (2 + 1.2 * 16) roundings, exp and its argument on the
  // host within 20; a thread adds, and rescales by another exp, once in 256 elements at most;
  // trees. Of lse, absolute: that, and roundings of values up to 32.
  const double chain = static_cast<double>(s.vocab) / 256 + 1;
  const double bound = (43 + 20 + chain * 45 + 80 + 4 * 32) * round_error(dtype);
  c.close(lse, 0, bound);
  c.close(loss, 0, bound);
}

void check_backward(Case& c, const Setup& s, DType dtype, DType target_dtype, bool in_place,
                    int scale_stride) {
  const std::int64_t n = s.rows * s.row_stride;
  Operand& logits = in_place ? c.updated(dtype, n, -8, 8) : c.input(dtype, n, -8, 8);
  Operand& out = in_place ? logits : c.output(dtype, s.rows * s.d_row_stride);
  Operand& targets = targets_of(c, s, target_dtype);
  Operand &lse = c.input(statistics(dtype), s.rows, 8, 12),
          &scale = c.input(statistics(dtype), scale_stride ? s.rows : 1);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.cross_entropy_backward({.d_logits = out.at(side),
                              .logits = logits.at(side),
                              .targets = targets.at(side),
                              .lse = lse.at(side),
                              .scale = scale.at(side),
                              .host_scale = 0.37,
                              .rows = s.rows,
                              .vocab = s.vocab,
                              .row_stride = s.row_stride,
                              .d_row_stride = in_place ? s.row_stride : s.d_row_stride,
                              .ignore_index = kIgnored,
                              .scale_stride = scale_stride,
                              .dtype = dtype,
                              .target_dtype = target_dtype},
                             exec);
  });
  // exp of an argument up to 20 long: 20 + 2 roundings a side; the target's 1 is exact, so it keeps
  // the absolute error of the probability. f16 has a coarsest step of 2^-24.
  const double u = 2 * (20 + 4) * round_error(dtype);
  c.close(out, 2 * epsilon(dtype) + u, u + (dtype == f16 ? 0x1p-24 : 0));
}

}  // namespace

TESSERA_CASE("cross_entropy", "vocabularies of any size") {
  for (const DType dtype : kFloats)
    for (const Setup& s : {Setup{1, 1, 1, 1},
                           {7, 7, 7, 7},
                           {5, 64, 64, 64},
                           {6, 257, 257, 257},
                           {6, 1021, 1024, 1025},
                           {9, 2500, 2501, 2501},
                           {5, 9001, 9001, 9001}}) {
      check_forward(c, s, dtype, s.vocab % 2 ? i32 : i64);
      check_backward(c, s, dtype, s.vocab % 2 ? i64 : i32, false, s.rows % 2);
      check_backward(c, s, dtype, i64, true, 1);
    }
}

// A NaN or +inf makes the row NaN, as does nothing but -inf; -inf alone counts nothing, also as the
// first value that a thread sees.
TESSERA_CASE("cross_entropy", "special values") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : kFloats) {
    const std::int64_t vocab = 5003, rows = 5;
    Operand &logits = c.input(dtype, rows * vocab, -8, 8), &targets = c.input(i32, rows, 5, 5);
    Operand &loss = c.output(statistics(dtype), rows), &lse = c.output(statistics(dtype), rows);
    logits.set(17, std::numeric_limits<double>::quiet_NaN());
    logits.set(vocab + 4999, inf);
    for (std::int64_t i = 0; i < vocab; ++i) logits.set(2 * vocab + i, -inf);
    for (std::int64_t i = 0; i < 3000; ++i) logits.set(3 * vocab + i, -inf);
    logits.set(4 * vocab + 4000, 60000);
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      k.cross_entropy({.loss = loss.at(side),
                       .lse = lse.at(side),
                       .logits = logits.at(side),
                       .targets = targets.at(side),
                       .rows = rows,
                       .vocab = vocab,
                       .row_stride = vocab,
                       .dtype = dtype,
                       .target_dtype = i32},
                      exec);
    });
    c.close(lse, 1e3 * round_error(dtype), 0);  // see above: about 21 chains
    c.close(loss, 1e3 * round_error(dtype), 0);
  }
}
