// Reductions: rows and columns of any length, all types, the first of equal values, NaN.
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

struct ReducedView {
  std::int64_t outer, n, inner;
  bool shifted = false;

  std::int64_t size() const { return outer * n * inner; }
  // Where element j of the reduction that gives output i lies.
  std::int64_t at(std::int64_t i, std::int64_t j) const {
    return (i / inner * n + j) * inner + i % inner;
  }
};

void reduce(Case& c, const ReducedView& s, ReduceOp op, const Operand& in, const Operand& out) {
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.reduce({.out = out.at(side),
              .in = in.at(side),
              .outer = s.outer,
              .n = s.n,
              .inner = s.inner,
              .op = op,
              .dtype = in.dtype(),
              .out_dtype = out.dtype()},
             exec);
  });
}

void check_sum(Case& c, const ReducedView& s, ReduceOp op, DType dtype, DType out_dtype) {
  Operand &in = c.input(dtype, s.size(), is_floating(dtype) ? -2 : -1000,
                        is_floating(dtype) ? 2 : 1000, shift_of(dtype, s.shifted)),
          &out = c.output(out_dtype, s.outer * s.inner);
  if (op != ReduceOp::sum && in.size() > 9) in.set(9, std::numeric_limits<double>::quiet_NaN());
  reduce(c, s, op, in, out);
  for (std::int64_t i = 0; i < out.size(); ++i) {
    if (!is_floating(dtype)) {
      double sum = 0;
      for (std::int64_t j = 0; j < s.n; ++j) sum += in.get(s.at(i, j));
      c.near(out, i, sum, 0);
      continue;
    }
    in_compute_type(dtype, [&]<class C>(C) {
      BoundedSum<C> sum;
      for (std::int64_t j = 0; j < s.n; ++j) {
        const auto x = Bounded<C>::given(in.get(s.at(i, j)));
        sum.add(op == ReduceOp::sumsq ? x * x : x);
      }
      const Bounded<C> total = sum.get();
      near(c, out, i, op == ReduceOp::mean ? total / Bounded<C>(static_cast<double>(s.n)) : total);
    });
  }
  c.next();
}

void check_choice(Case& c, const ReducedView& s, ReduceOp op, DType dtype) {
  const bool is_place = op == ReduceOp::argmax || op == ReduceOp::argmin;
  Operand &in = c.input(dtype, s.size(), -4, 4, shift_of(dtype, s.shifted)),
          &out = c.output(is_place ? i64 : dtype, s.outer * s.inner);
  if (is_floating(dtype))  // equal ones and NaN
    for (std::int64_t i = 0; i < in.size(); ++i)
      in.set(i, c.integer(0, 60) == 0 ? std::numeric_limits<double>::quiet_NaN()
                                      : std::round(2 * in.get(i)) / 2);
  reduce(c, s, op, in, out);
  const bool smallest_wins = op == ReduceOp::min || op == ReduceOp::argmin;
  for (std::int64_t i = 0; i < out.size(); ++i) {
    std::int64_t best = 0;
    for (std::int64_t j = 1; j < s.n; ++j) {
      const double x = in.get(s.at(i, j)), y = in.get(s.at(i, best));
      if (!std::isnan(y) && (std::isnan(x) || (smallest_wins ? x < y : x > y))) best = j;
    }
    double expected = static_cast<double>(best);
    if (!is_place)
      expected = s.n > 0 ? in.get(s.at(i, best)) : visit(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        using Limits = std::numeric_limits<T>;
        const double infinity = std::numeric_limits<double>::infinity();
        if (is_floating(dtype)) return smallest_wins ? infinity : -infinity;
        return static_cast<double>(smallest_wins ? Limits::max() : Limits::lowest());
      });
    c.near(out, i, expected, 0);
  }
  c.next();
}

}  // namespace

// Of the sum, the product with the scale, and what is there: Bounded counts their roundings.
TESSERA_CASE("reduce", "a scaled sum or mean, added to what is there") {
  for (const DType dtype : kFloats)
    for (const DType out_dtype : {dtype, dtype == f64 ? f64 : f32})
      for (const bool accumulate : {false, true})
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean})
          for (const ReducedView& s :
               {ReducedView{2, 40, 1}, {1, 1531, 33}, {2, 300, 64}, {1, 300, 784}}) {
            Operand& in = c.input(dtype, s.size());
            Operand& out = accumulate ? c.updated(out_dtype, s.outer * s.inner)
                                      : c.output(out_dtype, s.outer * s.inner);
            constexpr double scale = 0.3;
            c.compute([&](const Kernels& k, Side side, Exec& exec) {
              k.reduce({.out = out.at(side),
                        .in = in.at(side),
                        .outer = s.outer,
                        .n = s.n,
                        .inner = s.inner,
                        .op = op,
                        .dtype = dtype,
                        .out_dtype = out_dtype,
                        .accumulate = accumulate,
                        .scale = scale},
                       exec);
            });
            for (std::int64_t i = 0; i < out.size(); ++i)
              in_compute_type(dtype, [&]<class C>(C) {
                BoundedSum<C> sum;
                for (std::int64_t j = 0; j < s.n; ++j)
                  sum.add(Bounded<C>::given(in.get(s.at(i, j))));
                Bounded<C> total = sum.get();
                if (op == ReduceOp::mean) total = total / Bounded<C>(static_cast<double>(s.n));
                total = Bounded<C>(scale) * total;
                near(c, out, i, accumulate ? Bounded<C>::given(out.get(i)) + total : total);
              });
            c.next();
          }
}

TESSERA_CASE("reduce", "sums of rows and columns") {
  for (const DType dtype : kAll)
    for (const ReducedView& s : {ReducedView{1, 1, 1},
                                 {3, 7, 1},
                                 {9, 64, 1},
                                 {5, 1031, 1},
                                 {1, 2 * 16384 + 17, 1},
                                 {2, 33, 1, true},
                                 {2, 5, 3},
                                 {1, 300, 64},
                                 {1, 2311, 776},
                                 {3, 40, 257},
                                 {1, 1531, 33},
                                 {2, 9, 32, true},
                                 {0, 4, 1},
                                 {3, 0, 1},
                                 {2, 0, 5}}) {
      if (!is_floating(dtype)) {
        check_sum(c, s, ReduceOp::sum, dtype, i64);
        continue;
      }
      // f16 ends at 65504.
      const bool narrow = size_bytes(dtype) == 2;
      const DType own = s.n > 10000 && narrow ? f32 : dtype, wide = narrow ? f32 : dtype;
      check_sum(c, s, ReduceOp::sum, dtype, own);
      check_sum(c, s, ReduceOp::mean, dtype, wide);
      check_sum(c, s, ReduceOp::mean, dtype, dtype);
      check_sum(c, s, ReduceOp::sumsq, dtype, own);
    }
}

TESSERA_CASE("reduce", "maxima, minima and their places") {
  for (const DType dtype : kAll)
    for (const ReducedView& s : {ReducedView{1, 1, 1},
                                 {7, 19, 1},
                                 {4, 600, 1},
                                 {2, 33, 1, true},
                                 {2, 5, 3},
                                 {3, 11, 130},
                                 {2, 300, 3},
                                 {3, 0, 1},
                                 {2, 0, 5}})
      for (const ReduceOp op : {ReduceOp::max, ReduceOp::min, ReduceOp::argmax, ReduceOp::argmin})
        check_choice(c, s, op, dtype);
}

TESSERA_CASE("reduce", "sum of squares in double precision") {
  for (const DType out_dtype : {f32, f64})
    for (const std::int64_t count : {0, 1, 15, 16, 17, 1000, 16384, 65537, 300001})
      for (const bool accumulate : {false, true}) {
        Operand &in = c.input(f32, count, -2, 2, 4),
                &out = accumulate ? c.updated(out_dtype, 1) : c.output(out_dtype, 1);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.sumsq_flat({.out = out.at(side),
                        .in = {in.at<const float>(side)},
                        .count = {count},
                        .arrays = 1,
                        .out_dtype = out_dtype,
                        .accumulate = accumulate},
                       exec);
        });
        // In f64; one rounding to f32.
        BoundedSum<double> sum;
        for (std::int64_t i = 0; i < count; ++i) {
          const auto x = Bounded<double>::given(in.get(i));
          sum.add(x * x);
        }
        const Bounded<double> total = sum.get();
        near(c, out, 0, accumulate ? total + Bounded<double>::given(out.get(0)) : total);
        c.next();
      }
}

TESSERA_CASE("reduce", "sum of squares of several arrays") {
  constexpr std::int64_t counts[] = {1, 16384, 0, 50001, 17, 0, 40000}, part = 16384;
  Operand &out = c.output(f64, 1), &sums = c.output(f64, 1 + 1 + 1 + 4 + 1 + 1 + 3);
  std::vector<Operand*> in;
  for (const std::int64_t count : counts) in.push_back(&c.input(f32, count, -2, 2));
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    std::int64_t before = 0;
    for (std::size_t first = 0; first < in.size(); first += kSumsqArrays) {
      const std::size_t end = std::min(in.size(), first + kSumsqArrays);
      SumsqFlatArgs args{.out = out.at(side),
                         .in = {},
                         .count = {},
                         .arrays = static_cast<std::int32_t>(end - first),
                         .out_dtype = f64,
                         .accumulate = before > 0,
                         .is_last = end == in.size(),
                         .parts = sums.at<double>(side),
                         .part = part,
                         .parts_before = before};
      for (std::size_t i = first; i < end; ++i) {
        args.in[i - first] = in[i]->at<const float>(side);
        args.count[i - first] = in[i]->size();
      }
      k.sumsq_flat(args, exec);
      before += parts_of(args);
    }
  });
  BoundedSum<double> sum;
  for (const Operand* x : in)
    for (std::int64_t i = 0; i < x->size(); ++i) {
      const auto value = Bounded<double>::given(x->get(i));
      sum.add(value * value);
    }
  near(c, out, 0, sum.get());
  c.next();
}

}  // namespace kernel_test
