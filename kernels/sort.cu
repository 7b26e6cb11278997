// A block sorts a row by Batcher's bitonic network over positions in global memory: log2(cols)^2 /
// 2 steps, a barrier after each. Its first comparison of each stage is mirrored, so that all put
// the smaller element in front and those past the end of a row, which are the largest, never move:
// no padding. Source: Batcher, "Sorting networks and their applications", 1968.
#include "kernels/sort.hpp"

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Sort {
  std::int64_t* order;
  const T* in;
  std::int64_t cols;
  bool descending;

  template <class C>
  TESSERA_DEVICE static bool less(const C& a, const C& b) {
    return a < b || (a == a && b != b);
  }
  TESSERA_DEVICE static auto value(const T& x) {
    if constexpr (std::is_integral_v<T>)
      return x;
    else
      return load_as_compute(x);
  }
  TESSERA_DEVICE bool is_before(const T* row, std::int64_t i, std::int64_t j) const {
    const auto a = value(row[i]), b = value(row[j]);
    if (descending ? less(b, a) : less(a, b)) return true;
    return !(descending ? less(a, b) : less(b, a)) && i < j;
  }
  // Puts each pair of positions `apart` bits apart in order.
  TESSERA_DEVICE void exchange(Thread& t, std::int64_t* positions, const T* row,
                               std::int64_t apart) const {
    for (std::int64_t i = t.index(); i < cols; i += kThreads) {
      const std::int64_t other = i ^ apart;
      if (other <= i || other >= cols || !is_before(row, positions[other], positions[i])) continue;
      const std::int64_t first = positions[i];
      positions[i] = positions[other];
      positions[other] = first;
    }
    t.sync();
  }
  TESSERA_DEVICE void operator()(Thread& t) const {
    std::int64_t* positions = order + t.block() * cols;
    const T* row = in + t.block() * cols;
    for (std::int64_t i = t.index(); i < cols; i += kThreads) positions[i] = i;
    t.sync();
    for (std::int64_t sorted = 1; sorted < cols; sorted *= 2) {
      exchange(t, positions, row, 2 * sorted - 1);
      for (std::int64_t apart = sorted / 2; apart > 0; apart /= 2)
        exchange(t, positions, row, apart);
    }
  }
};

}  // namespace

void sort(const SortArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<kThreads>(exec, {a.rows}, 0,
                     Sort<T>{a.order, static_cast<const T*>(a.in), a.cols, a.descending});
  });
}

}  // namespace tessera::kernels::cuda
