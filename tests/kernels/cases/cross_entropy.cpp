// Cross-entropy, its derivative, and both in one: rows that start anywhere, targets of both types,
// ignored and out of range.
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

constexpr int kIgnored = -7;

struct LogitsShape {
  std::int64_t rows, vocab, row_stride, d_row_stride;
};

// Targets inside the vocabulary, but for an ignored one and two beyond its ends.
Operand& targets_of(Case& c, const LogitsShape& s, DType dtype) {
  Operand& targets = c.input(dtype, s.rows, 0, static_cast<double>(s.vocab - 1));
  if (s.rows > 3) {
    targets.set(1, kIgnored);
    targets.set(2, static_cast<double>(s.vocab));
    targets.set(3, -1);
  }
  return targets;
}

// What the target of a row leaves of a value.
template <class C>
Bounded<C> unless_special(double target, std::int64_t vocab, bool is_part, Bounded<C> value) {
  if (is_part && target == -1) return value;
  if (target == kIgnored) return Bounded<C>(0);
  if (target >= 0 && target < static_cast<double>(vocab)) return value;
  return Bounded<C>::given(std::numeric_limits<double>::quiet_NaN());
}

// exp(x - lse), which a GPU makes of two instructions: within 2 + 1.173 |argument| units.
template <class C>
Bounded<C> share_of(double x, Bounded<C> lse) {
  if (std::exp(x - lse.v) == 0) return Bounded<C>(0, 0);
  const Bounded<C> a = Bounded<C>::given(x) - lse;
  const double power = std::exp(a.v);
  return {power, power * std::expm1(a.error), 4 + 2 * 1.173 * std::abs(a.v)};
}

// log(sum(exp(x))) of a row. A GPU's thread keeps the sum for its largest value so far, and
// multiplies it by another exponential where that one grows, once a pack of its 256th of the row or
// less, and once in the end. Each of these exponentials is within 2 + 1.173 |argument| units (CUDA
// C++ Programming Guide, __expf), its product rounds once, and its argument, which may be off by a
// rounding of itself, too; the arguments of a term add up to its distance from the maximum.
template <class C>
Bounded<C> lse_of(const Operand& logits, std::int64_t begin, std::int64_t vocab) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = begin; i < begin + vocab; ++i)
    if (std::isnan(logits.get(i)) || logits.get(i) > top) top = logits.get(i);
  const double factors = static_cast<double>(vocab) / 256 + 3;
  BoundedSum<C> total;
  for (std::int64_t i = begin; i < begin + vocab; ++i) {
    const double term = std::exp(logits.get(i) - top);
    const double roundings = 5 * factors + (2 * 1.173 + 1) * (top - logits.get(i));
    total.add(term == 0 ? Bounded<C>(0) : Bounded<C>(term, 0, roundings));
  }
  return Bounded<C>::given(top) + log(total.get());
}

void check_cross_entropy(Case& c, const LogitsShape& s, const Operand& logits,
                         const Operand& targets, bool is_part = false) {
  const DType dtype = logits.dtype();
  Operand &loss = c.output(computed_in(dtype), s.rows), &lse = c.output(computed_in(dtype), s.rows);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.cross_entropy({.loss = loss.at(side),
                     .lse = lse.at(side),
                     .logits = logits.at(side),
                     .targets = targets.at(side),
                     .rows = s.rows,
                     .vocab = s.vocab,
                     .row_stride = s.row_stride,
                     .ignore_index = kIgnored,
                     .dtype = dtype,
                     .target_dtype = targets.dtype(),
                     .is_part = is_part},
                    exec);
  });
  in_compute_type(dtype, [&]<class C>(C) {
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const Bounded<C> value = lse_of<C>(logits, r * s.row_stride, s.vocab);
      near(c, lse, r, value);
      const double target = targets.get(r);
      const bool exists = target >= 0 && target < static_cast<double>(s.vocab);
      const double x =
          exists ? logits.get(r * s.row_stride + static_cast<std::int64_t>(target)) : 0;
      near(c, loss, r,
           unless_special(target, s.vocab, is_part, exists ? value - Bounded<C>::given(x) : value));
    }
  });
  c.next();
}

void check_cross_entropy_backward(Case& c, const LogitsShape& s, DType dtype, DType target_dtype,
                                  bool in_place, int scale_stride) {
  const std::int64_t n = s.rows * s.row_stride,
                     out_stride = in_place ? s.row_stride : s.d_row_stride;
  Operand& logits = in_place ? c.updated(dtype, n, -8, 8) : c.input(dtype, n, -8, 8);
  Operand& out = in_place ? logits : c.output(dtype, s.rows * s.d_row_stride);
  Operand& targets = targets_of(c, s, target_dtype);
  const bool is_part = s.rows % 3 == 0;
  Operand &lse = c.input(computed_in(dtype), s.rows, 8, 12),
          &scale = c.input(computed_in(dtype), scale_stride ? s.rows : 1);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.cross_entropy_backward({.d_logits = out.at(side),
                              .logits = logits.at(side),
                              .targets = targets.at(side),
                              .lse = lse.at(side),
                              .scale = scale.at(side),
                              .host_scale = 0.37,
                              .rows = s.rows,
                              .vocab = s.vocab,
                              .row_stride = s.row_stride,
                              .d_row_stride = out_stride,
                              .ignore_index = kIgnored,
                              .scale_stride = scale_stride,
                              .dtype = dtype,
                              .target_dtype = target_dtype,
                              .is_part = is_part},
                             exec);
  });
  in_compute_type(dtype, [&]<class C>(C) {
    using B = Bounded<C>;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const double target = targets.get(r);
      const B factor = B::given(scale.get(r * scale_stride)) * B(0.37);
      for (std::int64_t i = 0; i < s.vocab; ++i) {
        B p = share_of(logits.get(r * s.row_stride + i), B::given(lse.get(r)));
        if (static_cast<double>(i) == target) p = p - B(1);
        near(c, out, r * out_stride + i, unless_special(target, s.vocab, is_part, p * factor));
      }
      for (std::int64_t i = s.vocab; i < out_stride; ++i)  // between rows nothing is written
        c.near(out, r * out_stride + i, out.get(r * out_stride + i), 0);
    }
  });
  c.next();
}

void check_cross_entropy_with_gradient(Case& c, const LogitsShape& s, Operand& logits,
                                       const Operand& targets) {
  const DType dtype = logits.dtype();
  Operand &loss = c.output(computed_in(dtype), s.rows), &scale = c.input(computed_in(dtype), 1);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.cross_entropy_with_gradient({.loss = loss.at(side),
                                   .logits = logits.at(side),
                                   .targets = targets.at(side),
                                   .scale = scale.at(side),
                                   .host_scale = 0.37,
                                   .rows = s.rows,
                                   .vocab = s.vocab,
                                   .row_stride = s.row_stride,
                                   .ignore_index = kIgnored,
                                   .dtype = dtype,
                                   .target_dtype = targets.dtype()},
                                  exec);
  });
  in_compute_type(dtype, [&]<class C>(C) {
    using B = Bounded<C>;
    const B factor = B::given(scale.get(0)) * B(0.37);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const std::int64_t begin = r * s.row_stride;
      const B lse = lse_of<C>(logits, begin, s.vocab);
      const double target = targets.get(r);
      B row_loss = lse;
      for (std::int64_t i = 0; i < s.vocab; ++i) {
        const double x = logits.get(begin + i);
        B p = share_of(x, lse);
        if (static_cast<double>(i) == target) row_loss = lse - B::given(x), p = p - B(1);
        near(c, logits, begin + i, unless_special(target, s.vocab, false, p * factor));
      }
      near(c, loss, r, unless_special(target, s.vocab, false, row_loss));
      const std::int64_t end = std::min(begin + s.row_stride, logits.size());
      for (std::int64_t i = begin + s.vocab; i < end; ++i)  // between rows nothing is written
        c.near(logits, i, logits.get(i), 0);
    }
  });
  c.next();
}

}  // namespace

TESSERA_CASE("cross_entropy", "vocabularies of any size") {
  for (const DType dtype : kFloats)
    for (const LogitsShape& s : {LogitsShape{1, 1, 1, 1},
                                 {7, 7, 7, 7},
                                 {9, 13, 16, 16},
                                 {5, 64, 64, 64},
                                 {50, 256, 259, 259},
                                 {6, 257, 257, 257},
                                 {6, 1021, 1024, 1025},
                                 {9, 2500, 2501, 2501},
                                 {5, 9001, 9001, 9001}})
      for (const DType target_dtype : {i32, i64}) {
        if (s.vocab > 1000 && (target_dtype == i32) != (s.vocab % 2 == 0)) continue;
        const Operand &logits = c.input(dtype, s.rows * s.row_stride, -8, 8),
                      &targets = targets_of(c, s, target_dtype);
        check_cross_entropy(c, s, logits, targets, s.rows % 3 == 0);
        check_cross_entropy_backward(c, s, dtype, target_dtype, false, s.rows % 2 == 1);
        check_cross_entropy_backward(c, s, dtype, target_dtype, true, target_dtype == i32);
        Operand& both = c.updated(dtype, s.rows * s.row_stride, -8, 8);
        check_cross_entropy_with_gradient(c, s, both, targets_of(c, s, target_dtype));
      }
}

// A thread adds up all parts of a row: its sum is multiplied where its largest value grows, as in
// lse_of, once a part at most.
TESSERA_CASE("cross_entropy", "losses over a vocabulary from those over its parts") {
  for (const DType dtype : {f32, f64})
    for (const auto& [rows, parts] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {300, 1}, {257, 6}, {19, 70}}) {
      Operand &losses = c.input(dtype, parts * rows, -8, 8),
              &lses = c.input(dtype, parts * rows, -8, 8), &loss = c.output(dtype, rows),
              &lse = c.output(dtype, rows),
              &targets = c.input(rows == 19 ? i32 : i64, rows, kIgnored, kIgnored + 3);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.cross_entropy_of_parts({.loss = loss.at(side),
                                  .lse = lse.at(side),
                                  .losses = losses.at(side),
                                  .lses = lses.at(side),
                                  .targets = targets.at(side),
                                  .rows = rows,
                                  .parts = parts,
                                  .ignore_index = kIgnored,
                                  .dtype = dtype,
                                  .target_dtype = targets.dtype()},
                                 exec);
      });
      in_compute_type(dtype, [&]<class C>(C) {
        using B = Bounded<C>;
        for (std::int64_t r = 0; r < rows; ++r) {
          double top = lses.get(r);
          for (std::int64_t p = 1; p < parts; ++p) top = std::max(top, lses.get(p * rows + r));
          BoundedSum<C> total;
          B rest(0);
          for (std::int64_t p = 0; p < parts; ++p) {
            const double below = top - lses.get(p * rows + r);
            total.add(
                B(std::exp(-below), 0, 5 * static_cast<double>(parts) + (2 * 1.173 + 1) * below));
            rest = rest + (B::given(losses.get(p * rows + r)) - B::given(lses.get(p * rows + r)));
          }
          const B whole = B::given(top) + log(total.get());
          near(c, lse, r, whole);
          near(c, loss, r, targets.get(r) == kIgnored ? B(0) : whole + rest);
        }
      });
      c.next();
    }
}

TESSERA_CASE("cross_entropy", "how many targets have a loss") {
  for (const DType dtype : {f32, f64})
    for (const DType target_dtype : {i32, i64})
      for (const std::int64_t rows : {0, 1, 5, 1023, 40000})
        for (const int most : {kIgnored, kIgnored + 2}) {  // all are ignored, and a third
          Operand &targets = c.input(target_dtype, rows, kIgnored, most),
                  &count = c.output(dtype, 1);
          const std::int32_t least = rows % 2 == 0 ? 0 : 1;
          c.compute([&](const Kernels& k, Side side, Exec& exec) {
            k.count_targets({.count = count.at(side),
                             .targets = targets.at(side),
                             .rows = rows,
                             .ignore_index = kIgnored,
                             .least = least,
                             .dtype = dtype,
                             .target_dtype = target_dtype},
                            exec);
          });
          double expected = 0;
          for (std::int64_t r = 0; r < rows; ++r) expected += targets.get(r) != kIgnored;
          c.near(count, 0, std::max<double>(expected, least), 0);
          c.next();
        }
}

// Rows of 117 KiB or more have wider blocks on a GPU; of those of 234, a block of an A100 and of an
// H100 keeps a part in its 163 or 227 KiB.
TESSERA_CASE("cross_entropy", "a gradient over long rows") {
  for (const DType dtype : kFloats)
    for (const std::int64_t kib : {117, 234}) {
      const std::int64_t vocab = kib * 1024 / static_cast<std::int64_t>(size_bytes(dtype)) + 5;
      const LogitsShape s{3, vocab, vocab + 2, vocab + 2};
      Operand &logits = c.updated(dtype, s.rows * s.row_stride, -8, 8),
              &targets = c.input(i64, s.rows, 0, static_cast<double>(vocab - 1));
      targets.set(1, static_cast<double>(vocab - 1));
      targets.set(2, kIgnored);
      check_cross_entropy_with_gradient(c, s, logits, targets);
    }
}

// A NaN or +inf makes the row NaN, as does nothing but -inf; -inf alone counts nothing, also as the
// first value that a thread sees.
TESSERA_CASE("cross_entropy", "special values") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : kFloats) {
    const std::int64_t vocab = 5003, rows = 5;
    const LogitsShape s{rows, vocab, vocab, vocab};
    const auto fill = [&](Operand& logits) -> Operand& {
      logits.set(17, std::numeric_limits<double>::quiet_NaN());
      logits.set(vocab + 4999, inf);
      for (std::int64_t i = 0; i < vocab; ++i) logits.set(2 * vocab + i, -inf);
      for (std::int64_t i = 0; i < 3000; ++i) logits.set(3 * vocab + i, -inf);
      logits.set(4 * vocab + 4000, 60000);
      return logits;
    };
    check_cross_entropy(c, s, fill(c.input(dtype, rows * vocab, -8, 8)), c.input(i32, rows, 5, 5));
    check_cross_entropy_with_gradient(c, s, fill(c.updated(dtype, rows * vocab, -8, 8)),
                                      c.input(i32, rows, 5, 5));
  }
}

}  // namespace kernel_test
