// RMSNorm and LayerNorm, forward and backward, against double precision.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

struct Setup {
  std::int64_t rows, cols;
  bool layer, weight, bias;
};

void check(kernel_test::Random& random, const Setup& s, DType dtype, DType grad_dtype,
           bool accumulate) {
  const DType stats = dtype == DType::f64 ? DType::f64 : DType::f32;
  const double eps = 1e-5, scale = 0.5, n = static_cast<double>(s.cols);
  const Array x = random.array(dtype, s.rows * s.cols), dy = random.array(dtype, s.rows * s.cols);
  const Array weight = random.array(dtype, s.cols), bias = random.array(dtype, s.cols);
  Array y(dtype, s.rows * s.cols), mean(stats, s.rows), rstd(stats, s.rows),
      dx(dtype, s.rows * s.cols);
  Array dw = random.array(grad_dtype, s.cols), db = random.array(grad_dtype, s.cols);
  const Array dw_before = dw, db_before = db;
  std::vector<std::byte> workspace(
      static_cast<std::size_t>(norm_workspace_bytes(s.rows, s.cols, dtype, true, true)));
  const void* w = s.weight ? weight.data() : nullptr;
  on_threads(
      [&](Exec& exec) {
        if (s.layer)
          cpu_kernels().layer_norm({.y = y.data(),
                                    .mean = mean.data(),
                                    .rstd = rstd.data(),
                                    .x = x.data(),
                                    .weight = w,
                                    .bias = s.bias ? bias.data() : nullptr,
                                    .rows = s.rows,
                                    .cols = s.cols,
                                    .eps = eps,
                                    .dtype = dtype},
                                   exec);
        else
          cpu_kernels().rms_norm({.y = y.data(),
                                  .rstd = rstd.data(),
                                  .x = x.data(),
                                  .weight = w,
                                  .rows = s.rows,
                                  .cols = s.cols,
                                  .eps = eps,
                                  .dtype = dtype},
                                 exec);
        cpu_kernels().norm_backward({.dx = dx.data(),
                                     .d_weight = dw.data(),
                                     .d_bias = s.layer ? db.data() : nullptr,
                                     .x = x.data(),
                                     .dy = dy.data(),
                                     .weight = w,
                                     .mean = s.layer ? mean.data() : nullptr,
                                     .rstd = rstd.data(),
                                     .workspace = workspace.data(),
                                     .rows = s.rows,
                                     .cols = static_cast<std::int32_t>(s.cols),
                                     .scale = static_cast<float>(scale),
                                     .dtype = dtype,
                                     .grad_dtype = grad_dtype,
                                     .accumulate = accumulate},
                                    exec);
      },
      y, mean, rstd, dx, dw, db);

  std::vector<double> ey, edx, edw(static_cast<std::size_t>(s.cols)), edb(edw);
  double largest_rstd = 0;
  for (std::int64_t r = 0; r < s.rows; ++r) {
    double m = 0, square = 0, g_mean = 0, product = 0;
    const auto at = [&](const Array& a, std::int64_t c) { return a[r * s.cols + c]; };
    const auto wt = [&](std::int64_t c) { return s.weight ? weight[c] : 1; };
    for (std::int64_t c = 0; s.layer && c < s.cols; ++c) m += at(x, c) / n;
    for (std::int64_t c = 0; c < s.cols; ++c) square += (at(x, c) - m) * (at(x, c) - m) / n;
    const double rs = 1 / std::sqrt(square + eps);
    largest_rstd = std::max(largest_rstd, rs);
    for (std::int64_t c = 0; c < s.cols; ++c) {
      const double g = at(dy, c) * wt(c), xhat = (at(x, c) - m) * rs;
      if (s.layer) g_mean += g / n;
      product += g * xhat / n;
      edw[static_cast<std::size_t>(c)] += scale * at(dy, c) * xhat;
      edb[static_cast<std::size_t>(c)] += scale * at(dy, c);
      ey.push_back(xhat * wt(c) + (s.layer && s.bias ? bias[c] : 0));
    }
    for (std::int64_t c = 0; c < s.cols; ++c)
      edx.push_back(rs * (at(dy, c) * wt(c) - g_mean - (at(x, c) - m) * rs * product));
  }
  for (std::int64_t c = 0; accumulate && c < s.cols; ++c) {
    edw[static_cast<std::size_t>(c)] += dw_before[c];
    edb[static_cast<std::size_t>(c)] += db_before[c];
  }
  // Values are at most 2, normalised ones 2 rstd; sums round at most 60 times (blocked), products a
  // few times.
  const double u = compute_epsilon(dtype) * 80, peak = 2 * largest_rstd + 1;
  require_close(y, ey, epsilon(dtype), u * 2 * peak);
  require_close(dx, edx, epsilon(dtype), u * 4 * peak * peak * largest_rstd);
  // Rows of a block are added one after the other: norm_block_rows roundings at most, then one per
  // block.
  const double adds = static_cast<double>(norm_block_rows(s.rows) + norm_blocks(s.rows) + 80) *
                      compute_epsilon(dtype);
  require_close(dw, edw, epsilon(grad_dtype), adds * static_cast<double>(s.rows + 2) * 2 * peak);
  if (s.layer)
    require_close(db, edb, epsilon(grad_dtype), adds * static_cast<double>(s.rows + 2) * 2);
}

}  // namespace

TEST_CASE("norms and their gradients agree with double precision", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const Setup& s : {Setup{1, 2, false, true, false},
                           {33, 17, false, true, false},
                           {70, 128, false, false, false},
                           {5, 1100, false, true, false},
                           {3, 5, true, true, true},
                           {100, 33, true, true, true},
                           {40, 64, true, false, false},
                           {0, 8, true, true, true}}) {
      for (const bool accumulate : {false, true}) {
        const DType grad_dtype = size_bytes(dtype) == 2 && accumulate ? DType::f32 : dtype;
        INFO(dtype << ": " << s.rows << " x " << s.cols << ", layer " << s.layer << ", accumulate "
                   << accumulate);
        check(random, s, dtype, grad_dtype, accumulate);
      }
    }
  }
}

TEST_CASE("the norms' backward pass writes only what is asked for", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const Array x = random.array(DType::f32, 40), dy = random.array(DType::f32, 40),
              rstd = random.array(DType::f32, 4, 0.5, 1);
  Array both(DType::f32, 40), alone(DType::f32, 40), dw(DType::f32, 10), dw_alone(DType::f32, 10),
      workspace(DType::f32, 10);
  Exec exec;
  NormBackwardArgs args{.dx = both.data(),
                        .d_weight = dw.data(),
                        .d_bias = nullptr,
                        .x = x.data(),
                        .dy = dy.data(),
                        .weight = nullptr,
                        .mean = nullptr,
                        .rstd = rstd.data(),
                        .workspace = workspace.data(),
                        .rows = 4,
                        .cols = 10,
                        .scale = 1,
                        .dtype = DType::f32,
                        .grad_dtype = DType::f32,
                        .accumulate = false};
  cpu_kernels().norm_backward(args, exec);
  args.dx = nullptr;
  args.d_weight = dw_alone.data();
  cpu_kernels().norm_backward(args, exec);
  args.dx = alone.data();
  args.d_weight = nullptr;
  args.workspace = nullptr;
  cpu_kernels().norm_backward(args, exec);
  REQUIRE(both.bytes == alone.bytes);
  REQUIRE(dw.bytes == dw_alone.bytes);
}

TEST_CASE("a norm adds its residual with the bits of a separate addition", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const std::int32_t rows = 5, cols = 37, n = rows * cols;
  Exec exec;
  for (const DType dtype : kFloats) {
    const DType stats = dtype == DType::f64 ? DType::f64 : DType::f32;
    const Array a = random.array(dtype, n), b = random.array(dtype, n), dy = random.array(dtype, n),
                d_sum = random.array(dtype, n), weight = random.array(dtype, cols);
    const auto add = [&](Array& out, const Array& left, const Array& right) {
      BinaryArgs args{};
      args.out = out.data();
      args.a = left.data();
      args.b = right.data();
      args.count = args.shape[0] = n;
      args.out_strides[0] = args.a_strides[0] = args.b_strides[0] = 1;
      args.op = BinaryOp::add;
      args.dtype = dtype;
      args.ndim = 1;
      cpu_kernels().binary(args, exec);
    };
    for (const bool layer : {false, true}) {
      INFO(dtype << ", layer " << layer);
      Array rstd(stats, rows), mean(stats, rows);
      const auto forward = [&](Array& y, const Array& x, const void* residual, void* sum) {
        if (layer)
          cpu_kernels().layer_norm({y.data(), mean.data(), rstd.data(), x.data(), weight.data(),
                                    weight.data(), rows, cols, 1e-5, dtype, residual, sum},
                                   exec);
        else
          cpu_kernels().rms_norm({y.data(), rstd.data(), x.data(), weight.data(), rows, cols, 1e-5,
                                  dtype, residual, sum},
                                 exec);
      };
      const auto backward = [&](Array& dx, const Array& x, const void* also) {
        NormBackwardArgs args{};
        args.dx = dx.data();
        args.x = x.data();
        args.dy = dy.data();
        args.weight = weight.data();
        args.mean = layer ? mean.data() : nullptr;
        args.rstd = rstd.data();
        args.rows = rows;
        args.cols = cols;
        args.dtype = args.grad_dtype = dtype;
        args.d_sum = also;
        cpu_kernels().norm_backward(args, exec);
      };
      Array sum(dtype, n), y(dtype, n), dx(dtype, n);
      Array sum_apart(dtype, n), y_apart(dtype, n), dx_apart(dtype, n);
      add(sum_apart, a, b);
      forward(y_apart, sum_apart, nullptr, nullptr);
      forward(y, a, b.data(), sum.data());
      REQUIRE(sum.bytes == sum_apart.bytes);
      REQUIRE(y.bytes == y_apart.bytes);
      backward(dx_apart, sum, nullptr);
      add(dx_apart, dx_apart, d_sum);
      backward(dx, sum, d_sum.data());
      REQUIRE(dx.bytes == dx_apart.bytes);
      Array taken = d_sum;  // dx may be d_sum
      backward(taken, sum, taken.data());
      REQUIRE(taken.bytes == dx.bytes);
    }
  }
}
