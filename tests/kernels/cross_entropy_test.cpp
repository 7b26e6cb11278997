// The fused cross-entropy, forward and backward, against double precision.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

// An exponential, a sum of n terms in blocks, a division: roundings relative to the result.
double roundings(std::int64_t n) { return std::log2(static_cast<double>(n) + 1) + 60; }

std::vector<double> softmax_of(const Array& x, std::int64_t row, std::int64_t n) {
  double top = -INFINITY, total = 0;
  for (std::int64_t c = 0; c < n; ++c) top = std::max(top, x[row + c]);
  std::vector<double> p;
  for (std::int64_t c = 0; c < n; ++c) p.push_back(std::exp(x[row + c] - top));
  for (const double v : p) total += v;
  for (double& v : p) v /= total;
  return p;
}

}  // namespace

TEST_CASE(
    "cross-entropy and its gradient agree with double precision; ignored and bad targets are seen",
    "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const DType target_dtype : {DType::i32, DType::i64}) {
      for (const auto& [rows, vocab] :
           {std::pair<std::int64_t, std::int64_t>{1, 1}, {9, 13}, {150, 256}, {4, 3001}}) {
        for (const std::int32_t scale_stride : {0, 1}) {
          INFO(dtype << ", " << target_dtype << ": " << rows << " x " << vocab);
          const std::int64_t stride = vocab + 3;
          const DType stats = dtype == DType::f64 ? DType::f64 : DType::f32;
          const Array logits = random.array(dtype, rows * stride, -10, 10),
                      scale = random.array(stats, rows);
          Array targets(target_dtype, rows);
          for (std::int64_t r = 0; r < rows; ++r)
            targets.set(r, static_cast<double>(random.integer(0, vocab - 1)));
          if (rows > 3) {
            targets.set(1, -100);
            targets.set(2, static_cast<double>(vocab));
          }
          Array loss(stats, rows), lse(stats, rows), d(dtype, rows * stride), in_place = logits;
          on_threads(
              [&](Exec& exec) {
                cpu_kernels().cross_entropy({.loss = loss.data(),
                                             .lse = lse.data(),
                                             .logits = logits.data(),
                                             .targets = targets.data(),
                                             .rows = rows,
                                             .vocab = vocab,
                                             .row_stride = stride,
                                             .dtype = dtype,
                                             .target_dtype = target_dtype},
                                            exec);
                CrossEntropyBackwardArgs args{.d_logits = d.data(),
                                              .logits = logits.data(),
                                              .targets = targets.data(),
                                              .lse = lse.data(),
                                              .scale = scale.data(),
                                              .host_scale = 0.25,
                                              .rows = rows,
                                              .vocab = vocab,
                                              .row_stride = stride,
                                              .d_row_stride = stride,
                                              .scale_stride = scale_stride,
                                              .dtype = dtype,
                                              .target_dtype = target_dtype};
                cpu_kernels().cross_entropy_backward(args, exec);
                args.d_logits = in_place.data();
                args.logits = in_place.data();
                cpu_kernels().cross_entropy_backward(args, exec);
              },
              loss, lse, d, in_place);
          std::vector<double> expected_loss, expected_lse,
              expected(static_cast<std::size_t>(rows * stride));
          for (std::int64_t r = 0; r < rows; ++r) {
            const auto p = softmax_of(logits, r * stride, vocab);
            const auto target = static_cast<std::int64_t>(targets[r]);
            const bool ignored = target == -100, bad = !ignored && target >= vocab;
            expected_lse.push_back(logits[r * stride] - std::log(p[0]));
            expected_loss.push_back(ignored ? 0
                                    : bad   ? NAN
                                            : expected_lse.back() - logits[r * stride + target]);
            for (std::int64_t c = 0; c < vocab; ++c) {
              const double g =
                  (p[static_cast<std::size_t>(c)] - (c == target)) * scale[r * scale_stride] * 0.25;
              expected[static_cast<std::size_t>(r * stride + c)] = ignored ? 0 : bad ? NAN : g;
              REQUIRE((in_place[r * stride + c] == d[r * stride + c] || bad));
            }
          }
          // lse and loss are differences of values up to 20 + log(vocab) < 32; p inherits the error
          // of lse.
          const double absolute = (32 + roundings(vocab)) * compute_epsilon(dtype);
          require_close(lse, expected_lse, 0, absolute);
          require_close(loss, expected_loss, 0, 2 * absolute);
          require_close(d, expected, epsilon(dtype), 2 * absolute + smallest(dtype));
        }
      }
    }
  }
}
