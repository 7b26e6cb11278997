#include "kernels/index.hpp"

#include <cmath>
#include <cstring>

#include "kernels/host/convert.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

std::int64_t index_at(const IndexArgs& a, std::int64_t i) {
  return a.index_dtype == DType::i32 ? static_cast<const std::int32_t*>(a.index)[i]
                                     : static_cast<const std::int64_t*>(a.index)[i];
}

// What an index out of range reads.
template <class T>
T missing() {
  if constexpr (std::is_integral_v<T>)
    return T{0};
  else
    return T(std::numeric_limits<Compute<T>>::quiet_NaN());
}

template <class T>
void add_to(T& out, T x) {
  if constexpr (std::is_same_v<T, bool>)
    out = out || x;
  else if constexpr (std::is_integral_v<T>)
    out = static_cast<T>(static_cast<std::make_unsigned_t<T>>(out) +
                         static_cast<std::make_unsigned_t<T>>(x));
  else
    out = T(static_cast<Compute<T>>(out) + static_cast<Compute<T>>(x));
}

// Calls f(o, first, last) for every outer index and a range of inner ones: tasks that share no
// element of `big`.
template <class F>
void for_columns(const IndexArgs& a, Exec& exec, F f) {
  constexpr std::int64_t columns = 256;
  const std::int64_t chunks = (a.inner + columns - 1) / columns;
  parallel_for(exec, a.outer * chunks, [&](std::int64_t task) {
    const std::int64_t first = task % chunks * columns;
    f(task / chunks, first, std::min(a.inner, first + columns));
  });
}

}  // namespace

void index_select(const IndexArgs& a, Exec& exec) {
  if (a.inner == 0) return;
  visit_moved(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_ranges(exec, a.outer * a.count, row_grain(a.inner),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const std::int64_t j = index_at(a, row % a.count);
                   T* out = static_cast<T*>(a.small) + row * a.inner;
                   const T* in = static_cast<const T*>(a.big) + (row / a.count * a.n + j) * a.inner;
                   if (j < 0 || j >= a.n)
                     std::fill_n(out, a.inner, missing<T>());
                   else
                     std::memcpy(static_cast<void*>(out), in,
                                 static_cast<std::size_t>(a.inner) * sizeof(T));
                 }
               });
  });
}

void index_add(const IndexArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_columns(a, exec, [&](std::int64_t o, std::int64_t first, std::int64_t last) {
      for (std::int64_t j = 0; j < a.count; ++j) {
        const std::int64_t to = index_at(a, j);
        if (to < 0 || to >= a.n) continue;
        T* out = static_cast<T*>(a.big) + (o * a.n + to) * a.inner;
        const T* in = static_cast<const T*>(a.small) + (o * a.count + j) * a.inner;
        for (std::int64_t i = first; i < last; ++i) add_to(out[i], in[i]);
      }
    });
  });
}

void gather(const IndexArgs& a, Exec& exec) {
  visit_moved(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t per_outer = a.count * a.inner;
    for_ranges(exec, a.outer * per_outer, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t e = begin; e < end; ++e) {
        const std::int64_t j = index_at(a, e);
        const T* in = static_cast<const T*>(a.big) + e / per_outer * a.n * a.inner + e % a.inner;
        static_cast<T*>(a.small)[e] = j < 0 || j >= a.n ? missing<T>() : in[j * a.inner];
      }
    });
  });
}

namespace {

// f(element of big, element of small) for all that meet, columns beside each other.
template <class T, class F>
void for_scattered(const IndexArgs& a, Exec& exec, F f) {
  for_columns(a, exec, [&](std::int64_t o, std::int64_t first, std::int64_t last) {
    T* out = static_cast<T*>(a.big) + o * a.n * a.inner;
    for (std::int64_t j = 0; j < a.count; ++j) {
      const std::int64_t row = (o * a.count + j) * a.inner;
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t to = index_at(a, row + i);
        if (to >= 0 && to < a.n) f(out[to * a.inner + i], static_cast<const T*>(a.small)[row + i]);
      }
    }
  });
}

}  // namespace

void scatter_add(const IndexArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_scattered<T>(a, exec, [](T& out, T x) { add_to(out, x); });
  });
}

void scatter(const IndexArgs& a, Exec& exec) {
  visit_moved(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_scattered<T>(a, exec, [](T& out, T x) { out = x; });
  });
}

}  // namespace tessera::kernels::cpu
