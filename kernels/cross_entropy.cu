// Cross-entropy: a block a row forward, one pass with a running maximum; backward by pieces of
// rows. Rows may start anywhere: elements before the first and after the last 16-byte boundary are
// taken singly.
#include "kernels/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kAtOnce = 4;  // packs of a thread under way together

TESSERA_DEVICE std::int64_t target_at(const void* targets, DType dtype, std::int64_t row) {
  return dtype == DType::i32 ? static_cast<const std::int32_t*>(targets)[row]
                             : static_cast<const std::int64_t*>(targets)[row];
}

// sum(exp(x - top)) of the values so far, where top is their maximum; -inf before the first.
template <class C>
struct ExpSum {
  C top = -std::numeric_limits<C>::infinity(), total = 0;

  template <class T, int N>
  TESSERA_DEVICE void add(const T (&values)[N]) {
    C next = top;
    for (int j = 0; j < N; ++j) next = Max{}(next, load_as_compute(values[j]));
    if (next == -std::numeric_limits<C>::infinity()) return;
    if (next != top) total *= exp_fast(top - next);
    for (int j = 0; j < N; ++j) total += exp_fast(load_as_compute(values[j]) - next);
    top = next;
  }
};

template <class T>
struct Forward {
  using C = Compute<T>;
  C *loss, *lse;
  const T* logits;
  const void* targets;
  std::int64_t row_stride, ignore_index;
  int vocab;
  DType target_dtype;
  bool is_part;

  TESSERA_DEVICE void operator()(Thread& t) const {
    constexpr int n = kPack<T>;
    const std::int64_t row = t.block();
    const T* x = logits + row * row_stride;
    const int head = elements_before_boundary(x, vocab), packs = (vocab - head) / n;
    ExpSum<C> sum;
    for (int p = t.index(); p < packs; p += kAtOnce * kThreads) {
      Pack<T, n> some[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k)
        if (p + k * kThreads < packs) some[k] = load<n>(x + head + (p + k * kThreads) * n);
      for (int k = 0; k < kAtOnce; ++k)
        if (p + k * kThreads < packs) sum.add(some[k].at);
    }
    const int rest = vocab - packs * n;  // fewer than 2 n: before and after the packs
    if (t.index() < rest) {
      const T single[1] = {x[t.index() < head ? t.index() : packs * n + t.index()]};
      sum.add(single);
    }
    C* scratch = t.shared<C>();
    constexpr C none = -std::numeric_limits<C>::infinity();
    const C top = block_reduce<kThreads>(t, sum.top, scratch, Max{});
    const C share = sum.top == none ? C(0) : sum.total * exp_fast(sum.top - top);
    const C total = block_reduce<kThreads>(t, share, scratch + kWarps, Sum{});
    if (t.index() == 0) finish(row, x, top == none ? top - top : top + std::log(total));
  }

  TESSERA_DEVICE void finish(std::int64_t row, const T* x, C value) const {
    const std::int64_t target = target_at(targets, target_dtype, row);
    lse[row] = value;
    loss[row] = target == ignore_index          ? C(0)
                : is_part && target == -1       ? value
                : target >= 0 && target < vocab ? value - load_as_compute(x[target])
                                                : std::numeric_limits<C>::quiet_NaN();
  }
};

template <class T>
struct Backward {
  using C = Compute<T>;
  static constexpr int N = kPack<T>, kPiece = kThreads * kAtOnce;  // packs of a block
  T* d_logits;
  const T* logits;
  const void* targets;
  const C *lse, *scale;
  std::int64_t row_stride, d_row_stride;
  C host_scale;
  int vocab, ignore_index, scale_stride;
  DType target_dtype;
  bool is_part;

  // What the elements of a row have in common.
  struct RowFactors {
    C lse, scale, fixed;  // `fixed` in place of a gradient, where `is_fixed`
    int target;
    bool is_fixed;
  };
  TESSERA_DEVICE RowFactors factors(std::int64_t row) const {
    const std::int64_t target = target_at(targets, target_dtype, row);
    const bool ignored = target == ignore_index, is_elsewhere = is_part && target == -1;
    return {lse[row], scale[row * scale_stride] * host_scale,
            ignored ? C(0) : std::numeric_limits<C>::quiet_NaN(), static_cast<int>(target),
            ignored || (target < 0 && !is_elsewhere) || target >= vocab};
  }
  TESSERA_DEVICE T gradient(const RowFactors& f, T x, int c) const {
    if (f.is_fixed) return rounded<T>(f.fixed);
    const C p = std::exp(load_as_compute(x) - f.lse);
    return rounded<T>((c == f.target ? p - C(1) : p) * f.scale);
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t row = t.block();
    const T* x = logits + row * row_stride;
    T* dx = d_logits + row * d_row_stride;
    const RowFactors f = factors(row);
    const int head = elements_before_boundary(x, vocab);
    if (head != elements_before_boundary(dx, vocab)) return singly(t, f, x, dx);
    const int packs = (vocab - head) / N, first = t.block_y() * kPiece + t.index();
    Pack<T, N> some[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kThreads < packs) some[k] = load<N>(x + head + (first + k * kThreads) * N);
    for (int k = 0; k < kAtOnce; ++k) {
      const int c = head + (first + k * kThreads) * N;
      if (first + k * kThreads >= packs) continue;
      for (int j = 0; j < N; ++j) some[k].at[j] = gradient(f, some[k].at[j], c + j);
      store(dx + c, some[k]);
    }
    if (t.block_y() != 0 || t.index() >= vocab - packs * N) return;
    const int c = t.index() < head ? t.index() : packs * N + t.index();
    dx[c] = gradient(f, x[c], c);
  }
  TESSERA_DEVICE void singly(Thread& t, const RowFactors& f, const T* x, T* dx) const {
    for (int k = 0; k < kAtOnce * N; ++k) {
      const int c = (t.block_y() * kAtOnce * N + k) * kThreads + t.index();
      if (c < vocab) dx[c] = gradient(f, x[c], c);
    }
  }
};

}  // namespace

void cross_entropy(const CrossEntropyArgs& a, Exec& exec) {
  if (a.vocab == 0 || are_too_many(a.vocab, exec)) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    launch<kThreads>(
        exec, {a.rows}, 2 * kWarps * sizeof(C),
        Forward<T>{static_cast<C*>(a.loss), static_cast<C*>(a.lse), static_cast<const T*>(a.logits),
                   a.targets, a.row_stride, a.ignore_index, static_cast<int>(a.vocab),
                   a.target_dtype, a.is_part});
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& a, Exec& exec) {
  if (a.vocab == 0 || are_too_many(a.vocab, exec)) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    launch<kThreads>(
        exec, {a.rows, blocks_for(a.vocab, Backward<T>::kPiece * Backward<T>::N)}, 0,
        Backward<T>{static_cast<T*>(a.d_logits), static_cast<const T*>(a.logits), a.targets,
                    static_cast<const C*>(a.lse), static_cast<const C*>(a.scale), a.row_stride,
                    a.d_row_stride, static_cast<C>(a.host_scale), static_cast<int>(a.vocab),
                    a.ignore_index, a.scale_stride, a.target_dtype, a.is_part});
  });
}

}  // namespace tessera::kernels::cuda
