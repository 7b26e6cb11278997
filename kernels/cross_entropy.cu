// Cross-entropy: a block a row forward, one pass with a running maximum; backward by pieces of
// rows. Rows may start anywhere: elements before the first and after the last 16-byte boundary are
// taken singly.
//
// Both in one are a wide block a row, which reads it once where it fits into shared memory:
//
//   read, keep in shared memory, add up | lse | what is kept, and the rest once more: gradients
#include "kernels/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/device.hpp"
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

// Calls f(p, pack) for a thread's packs p of [begin, end) in a block of kBlock threads.
template <int kBlock, class T, class F>
TESSERA_DEVICE void for_packs(Thread& t, const T* first, int begin, int end, F f) {
  constexpr int n = kPack<T>;
  for (int p = begin + t.index(); p < end; p += kAtOnce * kBlock) {
    Held<T, n> some[kAtOnce] = {};
    for (int k = 0; k < kAtOnce; ++k)
      if (p + k * kBlock < end) some[k] = load_held<n>(first + (p + k * kBlock) * n);
    for (int k = 0; k < kAtOnce; ++k)
      if (p + k * kBlock < end) f(p + k * kBlock, some[k]);
  }
}

// log(sum(exp)) of a row from the sums of a block's threads, on every thread. `scratch`: shared,
// two elements a warp.
template <int kBlock, class C>
TESSERA_DEVICE C lse_of(Thread& t, const ExpSum<C>& sum, C* scratch) {
  constexpr C none = -std::numeric_limits<C>::infinity();
  const C top = block_reduce<kBlock>(t, sum.top, scratch, Max{});
  const C share = sum.top == none ? C(0) : sum.total * exp_fast(sum.top - top);
  const C total = block_reduce<kBlock>(t, share, scratch + kBlock / kWarp, Sum{});
  return top == none ? top - top : top + std::log(total);
}

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
    for_packs<kThreads>(t, x + head, 0, packs,
                        [&](int, const Held<T, n>& held) { sum.add(Pack<T, n>(held).at); });
    const int rest = vocab - packs * n;  // fewer than 2 n: before and after the packs
    if (t.index() < rest) {
      const T single[1] = {x[t.index() < head ? t.index() : packs * n + t.index()]};
      sum.add(single);
    }
    const C value = lse_of<kThreads>(t, sum, t.shared<C>());
    if (t.index() == 0) finish(row, x, value);
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

// What the gradients of a row have in common.
template <class T>
struct RowFactors {
  using C = Compute<T>;
  C scale, fixed;  // `fixed` in place of a gradient, where `is_fixed`
  int target;
  bool is_fixed;

  TESSERA_DEVICE T gradient(T x, C lse, bool is_target) const {
    const C p = exp_fast(load_as_compute(x) - lse);
    return rounded<T>((is_target ? p - C(1) : p) * scale);
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

  TESSERA_DEVICE RowFactors<T> factors(std::int64_t row) const {
    const std::int64_t target = target_at(targets, target_dtype, row);
    const bool ignored = target == ignore_index, is_elsewhere = is_part && target == -1;
    return {scale[row * scale_stride] * host_scale,
            ignored ? C(0) : std::numeric_limits<C>::quiet_NaN(), static_cast<int>(target),
            ignored || (target < 0 && !is_elsewhere) || target >= vocab};
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t row = t.block();
    const T* x = logits + row * row_stride;
    T* dx = d_logits + row * d_row_stride;
    const RowFactors<T> f = factors(row);
    const C row_lse = lse[row];
    const auto gradient = [&](T value, int c) {
      return f.is_fixed ? rounded<T>(f.fixed) : f.gradient(value, row_lse, c == f.target);
    };
    const int head = elements_before_boundary(x, vocab);
    if (head != elements_before_boundary(dx, vocab)) {  // singly
      for (int k = 0; k < kAtOnce * N; ++k) {
        const int c = (t.block_y() * kAtOnce * N + k) * kThreads + t.index();
        if (c < vocab) dx[c] = gradient(x[c], c);
      }
      return;
    }
    const int packs = (vocab - head) / N, first = t.block_y() * kPiece + t.index();
    Pack<T, N> some[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kThreads < packs) some[k] = load<N>(x + head + (first + k * kThreads) * N);
    for (int k = 0; k < kAtOnce; ++k) {
      const int c = head + (first + k * kThreads) * N;
      if (first + k * kThreads >= packs) continue;
      for (int j = 0; j < N; ++j) some[k].at[j] = gradient(some[k].at[j], c + j);
      store(dx + c, some[k]);
    }
    if (t.block_y() != 0 || t.index() >= vocab - packs * N) return;
    const int c = t.index() < head ? t.index() : packs * N + t.index();
    dx[c] = gradient(x[c], c);
  }
};

// Both in place: a row's packs wait in shared memory for their lse, the first `kept` of them; the
// others are read again, the first thing after, while L2 has them.
template <class T, int kBlock>
struct WithGradient {
  using C = Compute<T>;
  static constexpr int N = kPack<T>, kBlocks = sizeof(T) == 8 ? 1 : 1024 / kBlock;
  static constexpr std::size_t kScratchBytes = 2 * kBlock / kWarp * sizeof(C);
  Forward<T> forward;
  Backward<T> backward;
  int kept;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t row = t.block();
    const int vocab = forward.vocab;
    T* x = backward.d_logits + row * backward.d_row_stride;
    const int head = elements_before_boundary(x, vocab), packs = (vocab - head) / N;
    const int rest = vocab - packs * N, in_shared = kept < packs ? kept : packs;
    T* const single = x + (t.index() < head ? t.index() : packs * N + t.index());
    auto* const here = t.shared<Held<T, N>>(kScratchBytes);
    ExpSum<C> sum;
    for_packs<kBlock>(t, x + head, 0, packs, [&](int p, const Held<T, N>& held) {
      if (p < in_shared) here[p] = held;
      sum.add(Pack<T, N>(held).at);
    });
    if (t.index() < rest) {
      const T one[1] = {*single};
      sum.add(one);
    }
    const RowFactors<T> f = backward.factors(row);
    const C lse = lse_of<kBlock>(t, sum, t.shared<C>());
    if (f.is_fixed) {
      if (t.index() == 0) forward.loss[row] = f.fixed;
      Pack<T, N> pack;
      for (int j = 0; j < N; ++j) pack.at[j] = rounded<T>(f.fixed);
      TESSERA_UNROLL(1)
      for (int p = t.index(); p < packs; p += kBlock) store(x + head + p * N, pack);
      if (t.index() < rest) *single = pack.at[0];
      return;
    }
    // Whoever has the target writes the loss.
    const auto write_target = [&](T hit) {
      forward.loss[row] = lse - load_as_compute(hit);
      x[f.target] = f.gradient(hit, lse, true);
    };
    const auto write = [&](int p, const Held<T, N>& held) {
      Pack<T, N> pack = held;
      const int c = head + p * N;
      const bool has_target = f.target >= c && f.target < c + N;
      T hit = {};
      if (has_target) hit = x[f.target];
      for (int j = 0; j < N; ++j) pack.at[j] = f.gradient(pack.at[j], lse, false);
      store(x + c, pack);
      if (has_target) write_target(hit);
    };
    for_packs<kBlock>(t, x + head, in_shared, packs, write);
    for (int p = t.index(); p < in_shared; p += kBlock) write(p, here[p]);
    if (t.index() >= rest) return;
    if (single == x + f.target)
      write_target(*single);
    else
      *single = f.gradient(*single, lse, false);
  }
};

// A thread a row.
template <class C>
struct OfParts {
  C *loss, *lse;
  const C *losses, *lses;
  const void* targets;
  std::int64_t rows;
  int parts, ignore_index;
  DType target_dtype;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t row = t.global_index();
    if (row >= rows) return;
    ExpSum<C> sum;
    C rest = 0;
    for (int p = 0; p < parts; ++p) {
      const C one[1] = {lses[p * rows + row]};
      sum.add(one);
      rest += losses[p * rows + row] - one[0];
    }
    const C value = sum.top + std::log(sum.total);
    const bool is_ignored = target_at(targets, target_dtype, row) == ignore_index;
    lse[row] = value;
    loss[row] = is_ignored ? C(0) : value + rest;
  }
};

// One block: rows are 8 bytes at most, a few thousand a step.
template <class C>
struct CountTargets {
  static constexpr int kBlock = 1024;
  C* count;
  const void* targets;
  std::int64_t rows;
  int ignore_index, least;
  DType target_dtype;

  TESSERA_DEVICE void operator()(Thread& t) const {
    C own = 0;
    for (std::int64_t row = t.index(); row < rows; row += kBlock)
      own += target_at(targets, target_dtype, row) != ignore_index ? C(1) : C(0);
    const C all = block_reduce<kBlock>(t, own, t.shared<C>(), Sum{});
    if (t.index() == 0) *count = all < C(least) ? C(least) : all;
  }
};

template <class T>
Forward<T> body_of(const CrossEntropyArgs& a) {
  using C = Compute<T>;
  return {static_cast<C*>(a.loss),
          static_cast<C*>(a.lse),
          static_cast<const T*>(a.logits),
          a.targets,
          a.row_stride,
          a.ignore_index,
          static_cast<int>(a.vocab),
          a.target_dtype,
          a.is_part};
}
template <class T>
Backward<T> body_of(const CrossEntropyBackwardArgs& a) {
  using C = Compute<T>;
  return {static_cast<T*>(a.d_logits),
          static_cast<const T*>(a.logits),
          a.targets,
          static_cast<const C*>(a.lse),
          static_cast<const C*>(a.scale),
          a.row_stride,
          a.d_row_stride,
          static_cast<C>(a.host_scale),
          static_cast<int>(a.vocab),
          a.ignore_index,
          a.scale_stride,
          a.target_dtype,
          a.is_part};
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& a, Exec& exec) {
  if (a.vocab == 0 || are_too_many(a.vocab, exec)) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<kThreads>(exec, {a.rows}, 2 * kWarps * sizeof(Compute<T>), body_of<T>(a));
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& a, Exec& exec) {
  if (a.vocab == 0 || are_too_many(a.vocab, exec)) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<kThreads>(exec, {a.rows, blocks_for(a.vocab, Backward<T>::kPiece * Backward<T>::N)}, 0,
                     body_of<T>(a));
  });
}

// Where two rows fit into the shared memory of a multiprocessor, one block reads while another
// writes; a longer row has a block of all the threads. By the row alone, since bits depend on it.
void cross_entropy_with_gradient(const CrossEntropyWithGradientArgs& a, Exec& exec) {
  if (a.vocab == 0 || are_too_many(a.vocab, exec)) return;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_blocks = [&](auto threads) {
      using Body = WithGradient<T, threads()>;
      const std::int64_t room = (most_shared_bytes() - Body::kScratchBytes) / 16;
      const auto kept = static_cast<int>(std::min(a.vocab / Body::N, room));
      launch<threads()>(exec, {a.rows}, Body::kScratchBytes + kept * std::size_t{16},
                        Body{body_of<T>(a.forward()), body_of<T>(a.backward()), kept});
    };
    if constexpr (sizeof(T) < 8)
      if (a.vocab * static_cast<std::int64_t>(sizeof(T)) > 112 * 1024)
        return launch_blocks(std::integral_constant<int, 1024>{});
    launch_blocks(std::integral_constant<int, 512>{});
  });
}

void cross_entropy_of_parts(const CrossEntropyOfPartsArgs& a, Exec& exec) {
  const auto launch_rows = [&]<class C>(C) {
    launch<kThreads>(
        exec, {blocks_for(a.rows, kThreads)}, 0,
        OfParts<C>{static_cast<C*>(a.loss), static_cast<C*>(a.lse), static_cast<const C*>(a.losses),
                   static_cast<const C*>(a.lses), a.targets, a.rows, static_cast<int>(a.parts),
                   a.ignore_index, a.target_dtype});
  };
  if (a.rows == 0 || a.parts == 0 || are_too_many(a.parts, exec)) return;
  a.dtype == DType::f64 ? launch_rows(0.0) : launch_rows(0.0F);
}

void count_targets(const CountTargetsArgs& a, Exec& exec) {
  const auto launch_block = [&]<class C>(C) {
    using Body = CountTargets<C>;
    launch<Body::kBlock>(
        exec, {1}, Body::kBlock / kWarp * sizeof(C),
        Body{static_cast<C*>(a.count), a.targets, a.rows, a.ignore_index, a.least, a.target_dtype});
  };
  a.dtype == DType::f64 ? launch_block(0.0) : launch_block(0.0F);
}

}  // namespace tessera::kernels::cuda
