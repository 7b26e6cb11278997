#include "kernels/softmax.hpp"

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

template <class T>
void softmax_row(T* y, const T* x, std::int64_t n) {
  using C = Compute<T>;
  const C top = max_of(x, n);
  const C total = exp_sum_of(x, n, top);
  const Vec<C> shift(top), factor(C(1) / total);
  map(y, n, [=](Vec<C> v) { return exp(v - shift) * factor; }, x);
}

template <class T>
void softmax_backward_row(T* dx, const T* y, const T* dy, std::int64_t n) {
  using C = Compute<T>;
  const Vec<C> dot(dot_of(y, dy, n));
  map(dx, n, [dot](Vec<C> a, Vec<C> b) { return a * (b - dot); }, y, dy);
}

}  // namespace

void softmax(const SoftmaxArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_ranges(exec, a.rows, row_grain(16 * a.cols), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin * a.cols; at < end * a.cols; at += a.cols)
        softmax_row(static_cast<T*>(a.y) + at, static_cast<const T*>(a.x) + at, a.cols);
    });
  });
}

void softmax_backward(const SoftmaxBackwardArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_ranges(exec, a.rows, row_grain(2 * a.cols), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin * a.cols; at < end * a.cols; at += a.cols)
        softmax_backward_row(static_cast<T*>(a.dx) + at, static_cast<const T*>(a.y) + at,
                             static_cast<const T*>(a.dy) + at, a.cols);
    });
  });
}

}  // namespace tessera::kernels::cpu
