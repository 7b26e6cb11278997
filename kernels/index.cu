// Indexing along the middle dimension. Rows are copied as in kernels/cuda/indexed.hpp and added
// as in rows_by_id.cu; where each element has an index of its own a thread walks a column, in
// order.
#include "kernels/index.hpp"

#include "kernels/cuda/indexed.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

constexpr int kThreads = 256;

indexed::Rows rows_of(const IndexArgs& a) {
  return {a.small, a.big, indexed::ids_of(a.index, a.index_dtype), a.outer, a.n, a.count, a.inner};
}

template <class U>
struct Gather {
  indexed::Rows r;
  std::uint64_t missing;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t per_outer = r.count * r.cols;
    for (std::int64_t e = t.global_index(); e < r.outer * per_outer; e += t.global_threads()) {
      const std::int64_t id = r.ids[e];
      static_cast<U*>(r.rows)[e] =
          id >= 0 && id < r.n
              ? static_cast<const U*>(r.table)[(e / per_outer * r.n + id) * r.cols + e % r.cols]
              : indexed::unit_of<U>(missing);
    }
  }
};

template <class T>
TESSERA_DEVICE void add(T& to, T x) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    to = static_cast<T>(static_cast<U>(to) + static_cast<U>(x));
  } else {
    to = rounded<T>(load_as_compute(to) + load_as_compute(x));
  }
}

template <class T, bool kAdds>
struct Scatter {
  indexed::Rows r;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t e = t.global_index(), o = e / r.cols, i = e - o * r.cols;
    if (o >= r.outer) return;
    T* column = static_cast<T*>(r.table) + o * r.n * r.cols + i;
    for (std::int64_t j = 0; j < r.count; ++j) {
      const std::int64_t at = (o * r.count + j) * r.cols + i, id = r.ids[at];
      if (id < 0 || id >= r.n) continue;
      const T x = static_cast<const T*>(r.rows)[at];
      if constexpr (kAdds)
        add(column[id * r.cols], x);
      else
        column[id * r.cols] = x;
    }
  }
};

}  // namespace

void index_select(const IndexArgs& a, Exec& exec) { indexed::copy_rows(rows_of(a), a.dtype, exec); }

void index_add(const IndexArgs& a, Exec& exec) {
  indexed::add_rows(rows_of(a), a.order, a.workspace, a.dtype, a.dtype, 1, exec);
}

void gather(const IndexArgs& a, Exec& exec) {
  const std::int64_t blocks = blocks_for(a.outer * a.count * a.inner, kThreads);
  indexed::with_unit(a.dtype, 1, false, [&](auto unit, std::int64_t) {
    launch<kThreads>(exec, {std::min<std::int64_t>(blocks, 1 << 20)}, 0,
                     Gather<decltype(unit)>{rows_of(a), indexed::missing_of(a.dtype)});
  });
}

void scatter_add(const IndexArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, bool>)
      launch<kThreads>(exec, {blocks_for(a.outer * a.inner, kThreads)}, 0,
                       Scatter<T, true>{rows_of(a)});
  });
}

void scatter(const IndexArgs& a, Exec& exec) {
  indexed::with_unit(a.dtype, 1, false, [&](auto unit, std::int64_t) {
    launch<kThreads>(exec, {blocks_for(a.outer * a.inner, kThreads)}, 0,
                     Scatter<decltype(unit), false>{rows_of(a)});
  });
}

}  // namespace tessera::kernels::cuda
