#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

namespace cuda_test {
namespace {

// A sigmoid is within 9 epsilon on CUDA (see math.hpp) and 7 on the CPU. A result is the product of
// up to three factors, of which sigmoid and slope are at most 1.1 and the others at most 2 (gate:
// 6), with at most five more roundings each side.
constexpr double kRoundings = 9 + 7 + 2 * 5;

double relative(DType dtype) { return size_bytes(dtype) == 2 ? 2 * epsilon(dtype) : 0; }
double absolute(DType dtype) {
  return kRoundings * 1.1 * 2 * 6 * epsilon(dtype == f64 ? f64 : f32) +
         (dtype == f16 ? 0x1p-24 : 0);
}

}  // namespace

TESSERA_CASE("swiglu", "forward and backward, fused halves and separate, any columns") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const std::int64_t cols : {1, 61, 64, 200})
      for (const bool fused : {false, true}) {
        const std::int64_t rows = 5, all = rows * cols, stride = fused ? 2 * cols : cols;
        Operand &both = c.input(dtype, 2 * all, -6, 6), &d_out = c.input(dtype, all),
                &out = c.output(dtype, all), &d_both = c.output(dtype, 2 * all);
        const auto size = static_cast<std::int64_t>(size_bytes(dtype));
        const std::int64_t up = (fused ? cols : all) * size;
        for (std::int64_t i = 0; i < 2 * all; ++i)  // up is within 2
          if (fused ? i % (2 * cols) >= cols : i >= all) both.set(i, both.get(i) / 3);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          SwigluArgs forward{};
          forward.out = out.at(side);
          forward.gate = both.at<std::byte>(side);
          forward.up = both.at<std::byte>(side) + up;
          forward.rows = rows;
          forward.cols = cols;
          forward.out_stride = cols;
          forward.gate_stride = forward.up_stride = stride;
          forward.dtype = dtype;
          k.swiglu(forward, exec);
          SwigluBackwardArgs backward{};
          backward.d_gate = d_both.at<std::byte>(side);
          backward.d_up = d_both.at<std::byte>(side) + up;
          backward.gate = forward.gate;
          backward.up = forward.up;
          backward.d_out = d_out.at(side);
          backward.rows = rows;
          backward.cols = cols;
          backward.d_gate_stride = backward.d_up_stride = stride;
          backward.gate_stride = backward.up_stride = stride;
          backward.d_out_stride = cols;
          backward.dtype = dtype;
          k.swiglu_backward(backward, exec);
        });
        c.close(out, relative(dtype), absolute(dtype));
        c.close(d_both, relative(dtype), absolute(dtype));
        c.next();
      }
}

TESSERA_CASE("swiglu", "in place, misaligned, and far from zero") {
  for (const DType dtype : {f32, bf16, f16, f64}) {
    const auto shift = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t n = 333;
    Operand &gate = c.updated(dtype, n, -6, 6), &up = c.input(dtype, n, -2, 2, shift);
    gate.set(0, std::numeric_limits<double>::infinity());
    gate.set(1, -90);  // sigmoid is 0, or nearly
    gate.set(2, std::numeric_limits<double>::quiet_NaN());
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      k.swiglu({.out = gate.at(side),
                .gate = gate.at(side),
                .up = up.at(side),
                .rows = 1,
                .cols = n,
                .out_stride = n,
                .gate_stride = n,
                .up_stride = n,
                .dtype = dtype},
               exec);
    });
    c.close(gate, relative(dtype), absolute(dtype));
    c.next();
  }
}

}  // namespace cuda_test
