// Rows of a contiguous [rows, cols] that a group of a block's threads goes through together, and
// sums over such a group.
//
//   block of 256, group 64:   threads 0-63 ── row 4 b        each thread: packs of N elements,
//                             64-127 ──────── row 4 b + 1    group * N elements apart
//                             ...
//
// A group is a power of two of threads, at least a warp. Groups of a block go in step, since they
// share its barriers: one without a row goes through an empty one.
#pragma once

#include <type_traits>

#include "kernels/cuda/reduce.hpp"
#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {

// Columns are counted in 32 bits.
inline constexpr std::int64_t kMaxColumns = 0x7fffffff - 8 * 1024;
inline bool are_too_many(std::int64_t cols, Exec& exec) {
  if (cols > kMaxColumns)
    exec.error =
        "rows of more than 2^31 - 8193 elements have no CUDA kernel; use shorter rows or the CPU";
  return cols > kMaxColumns;
}

// base/dtype.hpp's visit over the floating dtypes; others do nothing.
template <class F>
void visit_floating(DType dtype, F f) {
  visit_computed(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_integral_v<T>) f(tag);
  });
}

// The smallest group whose threads see at most `elements` each, at most kThreads.
template <int kThreads>
int group_for(std::int64_t cols, int elements) {
  int group = kWarp;
  while (group < kThreads && std::int64_t{group} * elements < cols) group *= 2;
  return group;
}

// Calls f(tag, elements of a pack, elements kept of a thread, threads of a group) with how blocks
// of kThreads go through rows of `cols`: in packs of 16 bytes where rows and pointers are
// `aligned`, kept in registers where a block can hold a row; else element by element.
template <int kThreads, int kKept, class F>
void visit_rows(DType dtype, std::int64_t cols, bool aligned, Exec& exec, F f) {
  if (are_too_many(cols, exec)) return;
  using None = std::integral_constant<int, 0>;
  using One = std::integral_constant<int, 1>;
  using Kept = std::integral_constant<int, kKept>;
  visit_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < 8) {
      using Whole = std::integral_constant<int, kPack<T>>;
      if (aligned && cols % kPack<T> == 0)
        return cols <= kThreads * kKept ? f(tag, Whole{}, Kept{}, group_for<kThreads>(cols, kKept))
                                        : f(tag, Whole{}, None{}, kThreads);
    }
    f(tag, One{}, None{}, kThreads);
  });
}

// A thread's position among the groups of its block.
struct Group {
  int size, index, lane;  // threads; which of the block's groups; the thread's number within
  TESSERA_DEVICE Group(Thread& t, int threads)
      : size(threads), index(t.index() / threads), lane(t.index() % threads) {}
};

// Over a group, on every thread of it. `scratch`: shared, one element a warp of the block; free for
// another use after the next barrier.
template <class T, class F>
TESSERA_DEVICE T group_reduce(Thread& t, const Group& group, T value, T* scratch, F combine) {
  value = warp_reduce(t, value, combine);
  if (group.size == kWarp) return value;
  if (t.lane() == 0) scratch[t.warp()] = value;
  t.sync();
  const int warps = group.size / kWarp, first = group.index * warps;
  T all = scratch[first];
  for (int w = first + 1; w < first + warps; ++w) all = combine(all, scratch[w]);
  return all;
}

// A thread's packs of a row: kKept elements stay in registers after one pass over the memory; 0
// keeps none and reads again at each pass.
template <class T, int N, int kKept>
class Row {
 public:
  // Of `cols` elements at `from`; none where `live` is false.
  TESSERA_DEVICE Row(const Group& group, const T* from, int cols, bool live)
      : from_(from), first_(group.lane * N), step_(group.size * N), cols_(live ? cols : 0) {
    if constexpr (kKept > 0)
      for (int k = 0; k < kPacks; ++k)
        if (column(k) < cols_) packs_[k] = load_held<N>(from_ + column(k));
  }

  // f(first column, pack) for each pack. What f writes to it stays, where packs are kept.
  template <class F>
  TESSERA_DEVICE void each(F f) {
    if constexpr (kKept > 0) {
      for (int k = 0; k < kPacks; ++k)
        if (column(k) < cols_) {
          Pack<T, N> pack = packs_[k];
          f(column(k), pack);
          packs_[k] = pack;
        }
    } else {
      for (int c = first_; c < cols_; c += step_) {
        Pack<T, N> pack = load<N>(from_ + c);
        f(c, pack);
      }
    }
  }
  // f(value) for each element.
  template <class F>
  TESSERA_DEVICE void each_value(F f) {
    each([&](int, const Pack<T, N>& pack) {
      for (int j = 0; j < N; ++j) f(load_as_compute(pack.at[j]));
    });
  }
  // f(first column, pack of this row, pack of `other`), which lies like this one.
  template <class F>
  TESSERA_DEVICE void each_with(Row& other, F f) {
    if constexpr (kKept > 0) {
      for (int k = 0; k < kPacks; ++k)
        if (column(k) < cols_) {
          const Pack<T, N> pack = packs_[k], beside = other.packs_[k];
          f(column(k), pack, beside);
        }
    } else {
      each([&](int c, const Pack<T, N>& pack) { f(c, pack, load<N>(other.from_ + c)); });
    }
  }
  // The next passes find the row at `from`, which this thread has written.
  TESSERA_DEVICE void moved_to(const T* from) { from_ = from; }

 private:
  static constexpr int kPacks = kKept > 0 ? kKept / N : 1;
  TESSERA_DEVICE int column(int k) const { return first_ + k * step_; }

  const T* from_;
  int first_, step_, cols_;
  Held<T, N> packs_[kPacks];
};

}  // namespace tessera::kernels::cuda
