#include "kernels/cross_entropy.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

std::int64_t target_at(const void* targets, DType dtype, std::int64_t row) {
  return dtype == DType::i32 ? static_cast<const std::int32_t*>(targets)[row]
                             : static_cast<const std::int64_t*>(targets)[row];
}

// Writes the row's loss, and gives its lse.
template <class T>
Compute<T> forward_row(const CrossEntropyArgs& a, std::int64_t row) {
  using C = Compute<T>;
  const T* x = static_cast<const T*>(a.logits) + row * a.row_stride;
  const C top = max_of(x, a.vocab);
  const C lse = top + std::log(exp_sum_of(x, a.vocab, top));
  const std::int64_t target = target_at(a.targets, a.target_dtype, row);
  C loss = 0;
  if (a.is_part && target == -1)
    loss = lse;
  else if (target != a.ignore_index)
    loss = target >= 0 && target < a.vocab ? lse - static_cast<C>(x[target]) : C(NAN);
  static_cast<C*>(a.loss)[row] = loss;
  return lse;
}

template <class T>
void backward_row(const CrossEntropyBackwardArgs& a, std::int64_t row, Compute<T> lse) {
  using C = Compute<T>;
  const T* x = static_cast<const T*>(a.logits) + row * a.row_stride;
  T* dx = static_cast<T*>(a.d_logits) + row * a.d_row_stride;
  const std::int64_t target = target_at(a.targets, a.target_dtype, row);
  const bool ignored = target == a.ignore_index, is_elsewhere = a.is_part && target == -1;
  if (ignored || (target < 0 && !is_elsewhere) || target >= a.vocab) {
    const Vec<C> value(ignored ? C(0) : C(NAN));
    map(dx, a.vocab, [value](Vec<C>) { return value; }, x);
    return;
  }
  const C scale =
      static_cast<const C*>(a.scale)[row * a.scale_stride] * static_cast<C>(a.host_scale);
  const C hit = is_elsewhere ? C(0) : static_cast<C>(x[target]);
  const Vec<C> shift(lse), factor(scale);
  map(dx, a.vocab, [=](Vec<C> v) { return exp(v - shift) * factor; }, x);
  if (!is_elsewhere) dx[target] = T((std::exp(hit - lse) - C(1)) * scale);
}

// Calls row(tag, r) for each row.
template <class F>
void for_rows(DType dtype, std::int64_t rows, std::int64_t vocab, Exec& exec, const F& row) {
  if (vocab == 0) return;
  visit_floating(dtype, [&](auto tag) {
    for_ranges(exec, rows, row_grain(8 * vocab), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) row(tag, r);
    });
  });
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& a, Exec& exec) {
  for_rows(a.dtype, a.rows, a.vocab, exec, [&]<class Tag>(Tag, std::int64_t r) {
    using T = typename Tag::type;
    static_cast<Compute<T>*>(a.lse)[r] = forward_row<T>(a, r);
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& a, Exec& exec) {
  for_rows(a.dtype, a.rows, a.vocab, exec, [&]<class Tag>(Tag, std::int64_t r) {
    using T = typename Tag::type;
    backward_row<T>(a, r, static_cast<const Compute<T>*>(a.lse)[r]);
  });
}

void cross_entropy_with_gradient(const CrossEntropyWithGradientArgs& a, Exec& exec) {
  const CrossEntropyArgs forward = a.forward();
  const CrossEntropyBackwardArgs backward = a.backward();
  for_rows(a.dtype, a.rows, a.vocab, exec, [&]<class Tag>(Tag, std::int64_t r) {
    using T = typename Tag::type;
    backward_row<T>(backward, r, forward_row<T>(forward, r));
  });
}

void cross_entropy_of_parts(const CrossEntropyOfPartsArgs& a, Exec& exec) {
  const auto join = [&]<class C>(C) {
    const auto *const losses = static_cast<const C*>(a.losses),
                      *lses = static_cast<const C*>(a.lses);
    for_ranges(exec, a.rows, row_grain(8 * a.parts), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        C top = lses[r], total = 0, rest = 0;
        for (std::int64_t p = 1; p < a.parts; ++p) top = std::max(top, lses[p * a.rows + r]);
        for (std::int64_t p = 0; p < a.parts; ++p) {
          const std::int64_t at = p * a.rows + r;
          total += std::exp(lses[at] - top);
          rest += losses[at] - lses[at];
        }
        const C lse = top + std::log(total);
        const bool is_ignored = target_at(a.targets, a.target_dtype, r) == a.ignore_index;
        static_cast<C*>(a.lse)[r] = lse;
        static_cast<C*>(a.loss)[r] = is_ignored ? C(0) : lse + rest;
      }
    });
  };
  if (a.rows == 0 || a.parts == 0) return;
  a.dtype == DType::f64 ? join(0.0) : join(0.0F);
}

void count_targets(const CountTargetsArgs& a, Exec&) {
  std::int64_t count = 0;
  for (std::int64_t r = 0; r < a.rows; ++r)
    count += target_at(a.targets, a.target_dtype, r) != a.ignore_index ? 1 : 0;
  count = std::max<std::int64_t>(count, a.least);
  if (a.dtype == DType::f64)
    *static_cast<double*>(a.count) = static_cast<double>(count);
  else
    *static_cast<float*>(a.count) = static_cast<float>(count);
}

}  // namespace tessera::kernels::cpu
