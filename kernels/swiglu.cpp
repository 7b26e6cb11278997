// SwiGLU, the fused part of kernels/elementwise.hpp: one pass over gate and up instead of three.
#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

#include "kernels/formulas.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

constexpr std::int64_t kCost = 8;  // an exp and a division, in elements of cheap work

template <class T>
void forward(const SwigluArgs& a, Exec& exec) {
  using V = Vec<Compute<T>>;
  for_ranges(exec, a.rows, row_grain(kCost * a.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      map(
          static_cast<T*>(a.out) + r * a.out_stride, a.cols,
          [](V gate, V up) { return silu(gate) * up; },
          static_cast<const T*>(a.gate) + r * a.gate_stride,
          static_cast<const T*>(a.up) + r * a.up_stride);
    }
  });
}

template <class T>
void backward(const SwigluBackwardArgs& a, Exec& exec) {
  using C = Compute<T>;
  for_ranges(exec, a.rows, row_grain(2 * kCost * a.cols),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t r = begin; r < end; ++r) {
                 const T* gate = static_cast<const T*>(a.gate) + r * a.gate_stride;
                 const T* up = static_cast<const T*>(a.up) + r * a.up_stride;
                 const T* d_out = static_cast<const T*>(a.d_out) + r * a.d_out_stride;
                 T* d_gate = static_cast<T*>(a.d_gate) + r * a.d_gate_stride;
                 T* d_up = static_cast<T*>(a.d_up) + r * a.d_up_stride;
                 for_lanes<C>(a.cols, [&](std::int64_t i, auto io) {
                   const Vec<C> x = io.load(gate + i), u = io.load(up + i), d = io.load(d_out + i),
                                one(C(1));
                   const Vec<C> s = sigmoid(x), value = x * s;
                   io.store(d_gate + i, d * u * fma(value, one - s, s));
                   io.store(d_up + i, d * value);
                 });
               }
             });
}

}  // namespace

void swiglu(const SwigluArgs& args, Exec& exec) {
  visit_floating(args.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(args, exec); });
}

void swiglu_backward(const SwigluBackwardArgs& args, Exec& exec) {
  visit_floating(args.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(args, exec); });
}

}  // namespace tessera::kernels::cpu
