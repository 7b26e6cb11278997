// RMSNorm and LayerNorm: rows that fit registers and rows that do not, packs and single elements,
// with and without residual, parameters and their gradients.
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

constexpr double kNormEps = 1e-5;

struct NormShape {
  std::int64_t rows, cols;
  bool layer = false, affine = true, residual = false, shifted = false;
};

// The mean of f(i) over [0, n).
template <class C, class F>
Bounded<C> mean_of(std::int64_t n, F f) {
  BoundedSum<C> sum;
  for (std::int64_t i = 0; i < n; ++i) sum.add(f(i));
  return sum.get() / Bounded<C>(static_cast<double>(n));
}

struct NormOperands {
  const Operand &x, &y, &rstd, &mean, &weight, &bias;
};

// Row r of the outputs, from the row's inputs `x`.
template <class C>
void compare_norm_row(Case& c, const NormShape& s, const NormOperands& o, std::int64_t r,
                      const std::vector<double>& x) {
  using B = Bounded<C>;
  const auto at = [&](std::int64_t i) { return B::given(x[static_cast<std::size_t>(i)]); };
  const B mean = s.layer ? mean_of<C>(s.cols, at) : B(0);
  const B square = mean_of<C>(s.cols, [&](std::int64_t i) {
    const B z = s.layer ? at(i) - mean : at(i);
    return z * z;
  });
  const B rstd = B(1) / sqrt(square + B(kNormEps));
  near(c, o.rstd, r, rstd);
  if (s.layer) near(c, o.mean, r, mean);
  for (std::int64_t i = 0; i < s.cols; ++i) {
    B value = (s.layer ? at(i) - mean : at(i)) * rstd;
    if (s.affine) value = value * B::given(o.weight.get(i));
    if (s.affine && s.layer) value = value + B::given(o.bias.get(i));
    near(c, o.y, r * s.cols + i, value);
  }
}

// What one run of a norm reads and writes; y or most may be null.
struct NormRun {
  const Operand &x, &residual, &weight, &bias, &mean, &rstd, &sum;
  const Operand* y = nullptr;
  const Operand* most = nullptr;
};
void run_norm(const Kernels& k, Side side, Exec& exec, const NormShape& s, DType dtype,
              const NormRun& o) {
  const auto at = [&](const Operand& operand, bool is_wanted) {
    return is_wanted ? operand.at(side) : nullptr;
  };
  void* const y = o.y ? o.y->at(side) : nullptr;
  float* const most = o.most ? o.most->at<float>(side) : nullptr;
  if (s.layer)
    k.layer_norm({.y = y,
                  .mean = o.mean.at(side),
                  .rstd = o.rstd.at(side),
                  .x = o.x.at(side),
                  .weight = at(o.weight, s.affine),
                  .bias = at(o.bias, s.affine),
                  .rows = s.rows,
                  .cols = s.cols,
                  .eps = kNormEps,
                  .dtype = dtype,
                  .residual = at(o.residual, s.residual),
                  .sum = at(o.sum, s.residual),
                  .most = most},
                 exec);
  else
    k.rms_norm({.y = y,
                .rstd = o.rstd.at(side),
                .x = o.x.at(side),
                .weight = at(o.weight, s.affine),
                .rows = s.rows,
                .cols = s.cols,
                .eps = kNormEps,
                .dtype = dtype,
                .residual = at(o.residual, s.residual),
                .sum = at(o.sum, s.residual),
                .most = most},
               exec);
}

void check_norm(Case& c, const NormShape& s, DType dtype) {
  const std::int64_t n = s.rows * s.cols, shift = shift_of(dtype, s.shifted);
  const DType statistics = computed_in(dtype);
  Operand &x = c.input(dtype, n, -2, 2, shift), &y = c.output(dtype, n, shift),
          &rstd = c.output(statistics, s.rows), &mean = c.output(statistics, s.rows),
          &residual = c.input(dtype, n, -2, 2, shift), &sum = c.output(dtype, n, shift),
          &weight = c.input(dtype, s.cols), &bias = c.input(dtype, s.cols, -2, 2, shift);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    run_norm(k, side, exec, s, dtype, {x, residual, weight, bias, mean, rstd, sum, &y});
  });
  for (std::int64_t r = 0; r < s.rows; ++r) {
    std::vector<double> row;
    for (std::int64_t i = r * s.cols; i < (r + 1) * s.cols; ++i) {
      // The sum has the bits of a separate addition, and its rounded value is what is normalised.
      row.push_back(s.residual ? rounded_sum(dtype, x.get(i), residual.get(i)) : x.get(i));
      if (s.residual) c.near(sum, i, row.back(), 0);
    }
    in_compute_type(dtype, [&]<class C>(C) {
      compare_norm_row<C>(c, s, {x, y, rstd, mean, weight, bias}, r, row);
    });
  }
  c.next();
}

// The statistics without the norm, in the bits that it has beside y; the largest |y| of all rows is
// in one of the pieces.
void check_statistics(Case& c, const NormShape& s, DType dtype, std::int64_t largest_row = 0) {
  const std::int64_t n = s.rows * s.cols, pieces = norm_magnitudes(s.rows);
  Operand &x = c.input(dtype, n), &residual = c.input(dtype, n), &y = c.output(dtype, n),
          &weight = c.input(dtype, s.cols), &bias = c.input(dtype, s.cols),
          &most = c.output(f32, pieces);
  const std::int64_t column = c.integer(0, s.cols - 1);
  x.set(c.integer(0, n - 1), std::numeric_limits<double>::quiet_NaN());
  for (std::int64_t i = 0; i < s.cols; ++i) x.set(largest_row * s.cols + i, i == column ? 60 : 0);
  weight.set(column, 2);
  struct {
    Operand &mean, &rstd, &sum;
  } with{c.output(f32, s.rows), c.output(f32, s.rows), c.output(dtype, n)},
      without{c.output(f32, s.rows), c.output(f32, s.rows), c.output(dtype, n)};
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    run_norm(k, side, exec, s, dtype,
             {x, residual, weight, bias, with.mean, with.rstd, with.sum, &y});
    run_norm(k, side, exec, s, dtype,
             {x, residual, weight, bias, without.mean, without.rstd, without.sum, nullptr, &most});
  });
  const auto same = [&](const Operand& a, const Operand& b) {
    for (std::int64_t i = 0; i < a.size(); ++i) c.near(b, i, c.on_device(a, i), 0);
  };
  same(with.rstd, without.rstd);
  if (s.layer) same(with.mean, without.mean);
  if (s.residual) same(with.sum, without.sum);
  double of_y = 0, said = 0;
  for (std::int64_t i = 0; i < n; ++i)
    if (std::abs(c.on_device(y, i)) > of_y) of_y = std::abs(c.on_device(y, i));
  std::int64_t at = 0;
  for (std::int64_t p = 0; p < pieces; ++p)
    if (c.on_device(most, p) >= said) said = c.on_device(most, at = p);
  c.near(most, at, of_y, 0);
  for (std::int64_t p = 0; p < pieces; ++p) c.near(most, p, said / 2, said / 2);
  c.next();
}

struct NormWants {
  bool dx = true, d_weight = true, d_bias = true, d_sum = false, accumulate = false;
  bool over_dy = false, over_d_sum = false;  // where dx goes
};

void check_norm_backward(Case& c, const NormShape& s, const NormWants& wants, DType dtype,
                         DType grad_dtype) {
  const std::int64_t n = s.rows * s.cols, shift = shift_of(dtype, s.shifted);
  const DType statistics = computed_in(dtype);
  const bool d_bias = wants.d_bias && s.layer;
  Operand& x = c.input(dtype, n, -2, 2, shift);
  Operand& dy = wants.over_dy ? c.updated(dtype, n) : c.input(dtype, n);
  Operand& d_sum = wants.over_d_sum ? c.updated(dtype, n) : c.input(dtype, n);
  Operand& dx = wants.over_dy ? dy : wants.over_d_sum ? d_sum : c.output(dtype, n);
  Operand &weight = c.input(dtype, s.cols), &rstd = c.input(statistics, s.rows, 0.5, 1),
          &mean = c.input(statistics, s.rows, -0.5, 0.5), &dw = c.updated(grad_dtype, s.cols),
          &db = c.updated(grad_dtype, s.cols);
  if (!wants.accumulate)
    for (std::int64_t i = 0; i < s.cols; ++i) {
      dw.set(i, std::numeric_limits<double>::quiet_NaN());
      db.set(i, std::numeric_limits<double>::quiet_NaN());
    }
  const std::int64_t parts = norm_workspace_bytes(s.rows, s.cols, dtype, wants.d_weight, d_bias) /
                             static_cast<std::int64_t>(size_bytes(statistics));
  Operand& workspace = c.output(statistics, parts);
  const auto run = [&](const Operand& to, bool adds) {
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
      k.norm_backward({.dx = wants.dx ? to.at(side) : nullptr,
                       .d_weight = wants.d_weight ? dw.at(side) : nullptr,
                       .d_bias = d_bias ? db.at(side) : nullptr,
                       .x = x.at(side),
                       .dy = dy.at(side),
                       .weight = s.affine ? weight.at(side) : nullptr,
                       .mean = s.layer ? mean.at(side) : nullptr,
                       .rstd = rstd.at(side),
                       .workspace = parts > 0 ? workspace.at(side) : nullptr,
                       .rows = s.rows,
                       .cols = static_cast<std::int32_t>(s.cols),
                       .scale = 0.5f,
                       .dtype = dtype,
                       .grad_dtype = grad_dtype,
                       .accumulate = wants.accumulate,
                       .d_sum = adds ? d_sum.at(side) : nullptr},
                      exec);
    });
  };
  std::vector<double> apart;  // the norm's part of dx, and a separate addition
  if (wants.d_sum) {
    const Operand& own = c.output(dtype, n);
    run(own, false);
    for (std::int64_t i = 0; i < n; ++i)
      apart.push_back(rounded_sum(dtype, c.on_device(own, i), d_sum.get(i)));
  }
  run(dx, wants.d_sum);
  for (std::int64_t i = 0; i < std::ssize(apart); ++i)
    c.near(dx, i, apart[static_cast<std::size_t>(i)], 0);
  in_compute_type(dtype, [&]<class C>(C) {
    using B = Bounded<C>;
    std::vector<BoundedSum<C>> weights(static_cast<std::size_t>(s.cols)), biases(weights);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const B scale = B::given(rstd.get(r));
      const auto d = [&](std::int64_t i) { return B::given(dy.get(r * s.cols + i)); };
      const auto g = [&](std::int64_t i) {
        return s.affine ? d(i) * B::given(weight.get(i)) : d(i);
      };
      const auto xhat = [&](std::int64_t i) {
        const B value = B::given(x.get(r * s.cols + i));
        return (s.layer ? value - B::given(mean.get(r)) : value) * scale;
      };
      const B g_mean = s.layer ? mean_of<C>(s.cols, g) : B(0),
              product = mean_of<C>(s.cols, [&](std::int64_t i) { return g(i) * xhat(i); });
      for (std::int64_t i = 0; i < s.cols; ++i) {
        weights[static_cast<std::size_t>(i)].add(d(i) * xhat(i));
        biases[static_cast<std::size_t>(i)].add(d(i));
        if (!wants.dx) continue;
        B value = scale * (g(i) - g_mean - xhat(i) * product);
        if (wants.d_sum) {  // as a separate operation would: the norm's part is rounded first
          value.error = stored_error(dtype, value);
          value = value + B::given(d_sum.get(r * s.cols + i));
        }
        near(c, dx, r * s.cols + i, value);
      }
    }
    const auto compare = [&](const Operand& out, const std::vector<BoundedSum<C>>& sums) {
      for (std::int64_t i = 0; i < s.cols; ++i) {
        const B value = B(0.5) * sums[static_cast<std::size_t>(i)].get();
        near(c, out, i, wants.accumulate ? value + B::given(out.get(i)) : value);
      }
    };
    if (wants.d_weight) compare(dw, weights);
    if (d_bias) compare(db, biases);
  });
  c.next();
}

}  // namespace

TESSERA_CASE("norm", "forward, rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const bool layer : {false, true})
      for (const NormShape& s : {NormShape{1, 1, layer},
                                 {1, 2, layer},
                                 {3, pack - 1, layer, false},
                                 {9, pack, layer},
                                 {13, 96, layer, true, true},
                                 {70, 33, layer, true, true},
                                 {5, 1024 + pack, layer, false, true},
                                 {3, 8192, layer, true, layer},
                                 {2, 8192 + pack, layer, true, !layer},
                                 {2, 1021, layer, true, true},
                                 {3, 64, layer, true, true, true},
                                 {0, 8, layer}})
        check_norm(c, s, dtype);
  }
}

TESSERA_CASE("norm", "backward, rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const bool layer : {false, true}) {
      const auto check = [&](const NormShape& s, const NormWants& wants, DType grad_dtype) {
        check_norm_backward(c, s, wants, dtype, grad_dtype);
      };
      check({1, 1, layer}, {}, dtype);
      check({3, pack - 1, layer, false}, {.d_sum = true}, dtype);
      check({9, pack, layer}, {.accumulate = true}, computed_in(dtype));
      check({100, 96, layer}, {.d_sum = true}, computed_in(dtype));
      check({19, 520, layer}, {.d_sum = !layer, .over_dy = true}, dtype);
      check({2, 4096, layer}, {.d_sum = layer}, dtype);
      check({2, 4096 + pack, layer}, {}, dtype);
      check({1, 8192 + pack, layer}, {}, dtype);
      check({40, 61, layer}, {.accumulate = true, .over_dy = true}, dtype);
      check({5, 64, layer, true, false, true}, {.d_sum = true}, dtype);
      check({5, 37, layer}, {.d_sum = true, .over_d_sum = true}, dtype);
      check({4, 64, layer}, {.d_sum = true, .over_d_sum = true}, dtype);
    }
  }
}

TESSERA_CASE("norm", "statistics alone, of rows that fit registers and rows that do not") {
  for (const DType dtype : {f32, bf16, f16})
    for (const std::int64_t cols : {48, 1000, 33, 9000}) {
      const std::int64_t rows = cols < 100 ? 1050 : 20;
      check_statistics(c, {3, cols}, dtype, 1);
      for (const std::int64_t row : {std::int64_t{0}, rows - 1})
        check_statistics(c, {rows, cols, false, true, true}, dtype, row);
    }
  // Rows that a block goes through in two turns, each of them in packs.
  for (const std::int64_t row : {0, 8299}) check_statistics(c, {8300, 48}, bf16, row);
}

TESSERA_CASE("norm", "statistics of LayerNorm alone, and rows without parameters") {
  for (const DType dtype : {f32, bf16, f16})
    for (const std::int64_t cols : {48, 1000, 33}) {
      const std::int64_t rows = cols < 100 ? 1050 : 20;
      check_statistics(c, {5, cols, true, false}, dtype, 2);
      for (const std::int64_t row : {std::int64_t{0}, rows - 1})
        check_statistics(c, {rows, cols, true, true, true}, dtype, row);
    }
}

// More rows than all groups of a launch have: groups of a warp, and of whole blocks, of which a
// workspace of 1 MiB has parts for 127 at most.
TESSERA_CASE("norm", "backward, many rows") {
  for (const bool layer : {false, true}) {
    check_norm_backward(c, {2 * 264 * 8 + 5, 8, layer}, {.accumulate = true}, bf16, f32);
    for (const std::int64_t cols : {2056, 4104})  // 256 and 512 threads
      check_norm_backward(c, {2 * 63 + 5, cols, layer}, {.d_sum = true}, bf16, f32);
    check_norm_backward(c, {600, 3, layer}, {}, f32, f32);
  }
}

// Nor is there a workspace then.
TESSERA_CASE("norm", "gradients of no rows are 0, or what was there") {
  for (const bool layer : {false, true})
    for (const bool accumulate : {false, true})
      check_norm_backward(c, {0, 16, layer}, {.accumulate = accumulate}, f32, f32);
}

TESSERA_CASE("norm", "backward writes what is asked for") {
  for (const DType dtype : {bf16, f64})
    for (const bool layer : {false, true})
      for (const NormWants& wants : {NormWants{.d_weight = false, .d_bias = false},
                                     {.dx = false, .d_weight = false},
                                     {.dx = false, .d_bias = false},
                                     {.dx = false}})
        if (layer || wants.dx || wants.d_weight)
          check_norm_backward(c, {7, 40, layer}, wants, dtype, dtype);
}

// NaN and infinity stay in their row; y may be x.
TESSERA_CASE("norm", "special values, in place") {
  const std::int64_t cols = 72;
  const NormShape s{3, cols, false, false};
  Operand &x = c.updated(f32, 3 * cols), &rstd = c.output(f32, 3);
  x.set(5, std::numeric_limits<double>::quiet_NaN());
  x.set(cols + 7, std::numeric_limits<double>::infinity());
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.rms_norm({.y = x.at(side),
                .rstd = rstd.at(side),
                .x = x.at(side),
                .weight = nullptr,
                .rows = 3,
                .cols = cols,
                .eps = kNormEps,
                .dtype = f32},
               exec);
  });
  for (std::int64_t r = 0; r < 3; ++r) {
    std::vector<double> row;
    for (std::int64_t i = r * cols; i < (r + 1) * cols; ++i) row.push_back(x.get(i));
    compare_norm_row<float>(c, s, {x, x, rstd, rstd, x, x}, r, row);
  }
}

}  // namespace kernel_test
