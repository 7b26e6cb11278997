// Elementwise work over strided views of one shape, pack by pack.
//
//   a body:  struct Item                        what a thread keeps of one pack between its halves
//            Item load(std::int64_t pack) const
//            void finish(std::int64_t pack, const Item&) const
//   launch_packs<kUnroll>(exec, packs, body)    a thread loads kUnroll packs, then finishes them
//
// A pack is kPack elements in one access where every view allows it (`can_pack`), else one element.
// The loads of a thread come before its stores, so that an output may be an input and many bytes
// are in flight.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/vector.hpp"
#include "kernels/elementwise.hpp"

namespace tessera::kernels::cuda {

inline constexpr int kElementThreads = 256;
inline constexpr int kViewDims = kUnaryDims;  // the most of all elementwise contracts

// One operand of a launch: `strides` as in kernels/elementwise.hpp.
struct View {
  const void* data;
  const std::int32_t* strides;
  std::size_t size_bytes;  // of an element
};

// The common shape of kViews views, in packs along its last dimension.
template <int kViews>
struct Views {
  std::int64_t count;  // elements
  std::int32_t ndim;   // 0: contiguous
  std::int32_t shape[kViewDims];
  std::int32_t strides[kViews][kViewDims];  // elements from one pack to the next
  bool repeats[kViews];                     // the last dimension repeats one element

  template <int N>
  TESSERA_DEVICE int elements(std::int64_t pack) const {
    return ndim == 0 && count - pack * N < N ? static_cast<int>(count - pack * N) : N;
  }
  // The element of each view at which `pack` begins.
  template <int N>
  TESSERA_DEVICE void locate(std::int64_t pack, std::int64_t (&at)[kViews]) const {
    for (std::int64_t& x : at) x = ndim == 0 ? pack * N : 0;
    if (count <= std::numeric_limits<std::int32_t>::max())
      descend(static_cast<std::uint32_t>(pack), at);
    else
      descend(static_cast<std::uint64_t>(pack), at);
  }

 private:
  template <class Index>
  TESSERA_DEVICE void descend(Index rest, std::int64_t (&at)[kViews]) const {
    for (int d = ndim - 1; d >= 0; --d) {
      const auto size = static_cast<Index>(shape[d]);
      const Index above = d == 0 ? 0 : rest / size;
      const auto here = static_cast<std::int64_t>(rest - above * size);
      for (int v = 0; v < kViews; ++v) at[v] += here * strides[v][d];
      rest = above;
    }
  }
};

// Whether every view can be read, and the first one written, n elements at a time.
template <int kViews>
bool can_pack(int n, int ndim, const std::int32_t* shape, const View (&views)[kViews]) {
  if (ndim > 0 && shape[ndim - 1] % n != 0) return false;
  for (const View& view : views) {
    if (view.data == nullptr || (ndim > 0 && view.strides[ndim - 1] == 0)) continue;
    const std::size_t bytes = view.size_bytes * static_cast<std::size_t>(n);
    if (reinterpret_cast<std::uintptr_t>(view.data) % bytes != 0) return false;
    if (ndim > 0 && view.strides[ndim - 1] != 1) return false;
    for (int d = 0; d + 1 < ndim; ++d)
      if (view.strides[d] % n != 0) return false;
  }
  return true;
}

template <int kViews>
Views<kViews> make_views(int n, std::int64_t count, int ndim, const std::int32_t* shape,
                         const View (&views)[kViews]) {
  Views<kViews> result{};
  result.count = count;
  result.ndim = ndim;
  for (int d = 0; d < ndim; ++d) {
    const bool last = d == ndim - 1;
    result.shape[d] = last ? shape[d] / n : shape[d];
    for (int v = 0; v < kViews; ++v)
      if (views[v].data != nullptr) result.strides[v][d] = views[v].strides[d] * (last ? n : 1);
  }
  for (int v = 0; v < kViews; ++v)
    result.repeats[v] = ndim > 0 && views[v].data != nullptr && views[v].strides[ndim - 1] == 0;
  return result;
}

// `n` elements of a pack of N one by one, anywhere; the rest reads as 0.
template <int N, class T>
TESSERA_DEVICE Held<T, N> load_few(const T* p, int n) {
  Pack<T, N> pack{};
  for (int j = 0; j < N; ++j)
    if (j < n) pack.at[j] = p[j];
  return pack;
}
template <class T, int N>
TESSERA_DEVICE void store_few(T* p, const Pack<T, N>& pack, int n) {
  for (int j = 0; j < N; ++j)
    if (j < n) p[j] = pack.at[j];
}
// The same in one access where all N are there, which must be aligned then.
template <int N, class T>
TESSERA_DEVICE Held<T, N> load_most(const T* p, int n) {
  if (N > 1 && n == N) return load_held<N>(p);
  return load_few<N>(p, n);
}
template <class T, int N>
TESSERA_DEVICE void store_most(T* p, const Pack<T, N>& pack, int n) {
  if (N > 1 && n == N) return store(p, pack);
  store_few(p, pack, n);
}
// `n` elements of a view from *p, or n times this one.
template <int N, class T>
TESSERA_DEVICE Held<T, N> load_view(const T* p, bool repeats, int n) {
  if (!repeats) return load_most<N>(p, n);
  Pack<T, N> pack;
  for (T& x : pack.at) x = *p;
  return pack;
}

template <int kUnroll, class Body>
struct ForPacks {
  Body body;
  std::int64_t packs;

  TESSERA_DEVICE void operator()(Thread& t) const {
    typename Body::Item items[kUnroll] = {};
    const std::int64_t first = t.block() * (kElementThreads * kUnroll) + t.index();
    unrolled<kUnroll>([&](int u) {
      if (first + u * kElementThreads < packs) items[u] = body.load(first + u * kElementThreads);
    });
    unrolled<kUnroll>([&](int u) {
      if (first + u * kElementThreads < packs) body.finish(first + u * kElementThreads, items[u]);
    });
  }
};

template <int kUnroll, class Body>
void launch_packs(Exec& exec, std::int64_t packs, const Body& body) {
  launch<kElementThreads>(exec, Grid{blocks_for(packs, kElementThreads * kUnroll)}, 0,
                          ForPacks<kUnroll, Body>{body, packs});
}

// From a number to another type: truncating and saturating to integers, NaN to 0, `x != 0` to
// boolean, rounding once otherwise.
template <class To, class From>
constexpr To cast(From x) {
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // The upper bound is one above the largest integer, so that `<` is exact.
    constexpr From above = static_cast<From>(std::uint64_t{1} << std::numeric_limits<To>::digits);
    if (!(x == x)) return 0;
    if (x < (std::is_signed_v<To> ? -above : From(0))) return std::numeric_limits<To>::min();
    return x < above ? static_cast<To>(x) : std::numeric_limits<To>::max();
  } else if constexpr (std::is_class_v<To>) {
    return To(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

// An element of any dtype, exactly. For the rare pairs of dtypes, which share one slow kernel.
struct Number {
  double real = 0;
  std::int64_t whole = 0;
  bool is_real = true;

  template <class To>
  TESSERA_DEVICE To as() const {
    return is_real ? cast<To>(real) : cast<To>(whole);
  }
};
TESSERA_DEVICE Number load_number(DType dtype, const void* p, std::int64_t i) {
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T x = static_cast<const T*>(p)[i];
    Number number;
    number.is_real = !std::is_integral_v<T>;
    if constexpr (std::is_integral_v<T>)
      number.whole = x;
    else
      number.real = static_cast<double>(load_as_compute(x));
    return number;
  });
}
TESSERA_DEVICE void store_number(DType dtype, void* p, std::int64_t i, const Number& number) {
  visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(p)[i] = number.as<T>();
  });
}

}  // namespace tessera::kernels::cuda
