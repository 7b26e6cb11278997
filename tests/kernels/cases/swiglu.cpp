// SwiGLU and its derivative: halves of one projection and separate arrays, in place, far from zero.
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

template <class C>
void compare_swiglu(Case& c, const Operand& out, std::int64_t i, double gate, double up) {
  const auto x = Bounded<C>::given(gate);
  near(c, out, i, x * sigmoid(x) * Bounded<C>::given(up));
}

template <class C>
void compare_swiglu_backward(Case& c, const Operand& d_gate, std::int64_t gate_at,
                             const Operand& d_up, std::int64_t up_at, double gate, double up,
                             double gradient) {
  const auto x = Bounded<C>::given(gate), u = Bounded<C>::given(up),
             d = Bounded<C>::given(gradient);
  const Bounded<C> s = sigmoid(x), value = x * s, one(1);
  near(c, d_gate, gate_at, d * u * fma(value, one - s, s));
  near(c, d_up, up_at, d * value);
}

// Forward and backward over rows of a gate and an up of `cols` each.
void check_swiglu(Case& c, DType dtype, std::int64_t rows, std::int64_t cols, bool fused) {
  const std::int64_t all = rows * cols, stride = fused ? 2 * cols : cols, up = fused ? cols : all;
  const std::int64_t up_bytes = up * static_cast<std::int64_t>(size_bytes(dtype));
  Operand &both = c.input(dtype, 2 * all, -6, 6), &d_out = c.input(dtype, all),
          &out = c.output(dtype, all), &d_both = c.output(dtype, 2 * all);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    SwigluArgs forward{};
    forward.out = out.at(side);
    forward.gate = both.at<std::byte>(side);
    forward.up = both.at<std::byte>(side) + up_bytes;
    forward.rows = rows;
    forward.cols = cols;
    forward.out_stride = cols;
    forward.gate_stride = forward.up_stride = stride;
    forward.dtype = dtype;
    k.swiglu(forward, exec);
    SwigluBackwardArgs backward{};
    backward.d_gate = d_both.at<std::byte>(side);
    backward.d_up = d_both.at<std::byte>(side) + up_bytes;
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
  in_compute_type(dtype, [&]<class C>(C) {
    for (std::int64_t i = 0; i < all; ++i) {
      const std::int64_t at = i / cols * stride + i % cols;
      const double gate = both.get(at), factor = both.get(at + up);
      compare_swiglu<C>(c, out, i, gate, factor);
      compare_swiglu_backward<C>(c, d_both, at, d_both, at + up, gate, factor, d_out.get(i));
    }
  });
  c.next();
}

}  // namespace

TESSERA_CASE("swiglu", "forward and backward, fused halves and separate, any columns") {
  for (const DType dtype : kFloats)
    for (const bool fused : {false, true}) {
      for (const std::int64_t cols : {1, 61, 64, 200}) check_swiglu(c, dtype, 5, cols, fused);
      check_swiglu(c, dtype, 9, 53, fused);
      check_swiglu(c, dtype, 0, 4, fused);
      check_swiglu(c, dtype, 4, 0, fused);
    }
}

TESSERA_CASE("swiglu", "in place, misaligned, and far from zero") {
  for (const DType dtype : kFloats) {
    const std::int64_t n = 333;
    Operand &gate = c.updated(dtype, n, -6, 6),
            &up = c.input(dtype, n, 0.5, 2, shift_of(dtype, true));
    gate.set(0, std::numeric_limits<double>::infinity());
    gate.set(1, -90);  // sigmoid is 0, or nearly
    gate.set(2, std::numeric_limits<double>::quiet_NaN());
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
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
    in_compute_type(dtype, [&]<class C>(C) {
      for (std::int64_t i = 0; i < n; ++i) compare_swiglu<C>(c, gate, i, gate.get(i), up.get(i));
    });
    c.next();

    Operand &d_gate = c.updated(dtype, n, -6, 6), &d_up = c.updated(dtype, n),
            &d_out = c.input(dtype, n, -2, 2, shift_of(dtype, true));
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
      k.swiglu_backward({.d_gate = d_gate.at(side),
                         .d_up = d_up.at(side),
                         .gate = d_gate.at(side),
                         .up = d_up.at(side),
                         .d_out = d_out.at(side),
                         .rows = 1,
                         .cols = n,
                         .d_gate_stride = n,
                         .d_up_stride = n,
                         .gate_stride = n,
                         .up_stride = n,
                         .d_out_stride = n,
                         .dtype = dtype},
                        exec);
    });
    in_compute_type(dtype, [&]<class C>(C) {
      for (std::int64_t i = 0; i < n; ++i)
        compare_swiglu_backward<C>(c, d_gate, i, d_up, i, d_gate.get(i), d_up.get(i), d_out.get(i));
    });
    c.next();
  }
}

}  // namespace kernel_test
