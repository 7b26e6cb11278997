// Vectors of f32 or f64 for the CPU kernels: a thin value type over Eigen's packets, so that one
// source serves every instruction set. Tails are computed by the same vector code on a padded copy:
// an element's bits never depend on its position. Only the kernels' own .cpp files include this
// header.
#pragma once

// Eigen's fast square root is an approximation that turns infinity into NaN.
#define EIGEN_FAST_MATH 0
#include <Eigen/Core>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tessera/base/dtype.hpp"

// Packets carry alignment attributes that template arguments drop; Eigen silences the same warning
// in its own headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace tessera::kernels::host {

// The type in which elements of T are computed: f32 for 16-bit floats.
template <class T>
using Compute =
    std::conditional_t<std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>, float, T>;

// base/dtype.hpp's visit over the floating dtypes; others do nothing.
template <class F>
inline void visit_floating(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(TypeTag<float>{});
    case DType::bf16:
      return f(TypeTag<BFloat16>{});
    case DType::f16:
      return f(TypeTag<Float16>{});
    case DType::f64:
      return f(TypeTag<double>{});
    default:
      return;
  }
}

template <class C>
struct Vec {
  using Packet = typename Eigen::internal::packet_traits<C>::type;
  static constexpr int kLanes = Eigen::internal::packet_traits<C>::size;

  Packet v;

  Vec() = default;
  explicit Vec(Packet p, int) : v(p) {}
  explicit Vec(C x) : v(Eigen::internal::pset1<Packet>(x)) {}

  friend Vec operator+(Vec a, Vec b) { return Vec(Eigen::internal::padd(a.v, b.v), 0); }
  friend Vec operator-(Vec a, Vec b) { return Vec(Eigen::internal::psub(a.v, b.v), 0); }
  friend Vec operator*(Vec a, Vec b) { return Vec(Eigen::internal::pmul(a.v, b.v), 0); }
  friend Vec operator/(Vec a, Vec b) { return Vec(Eigen::internal::pdiv(a.v, b.v), 0); }
  friend Vec operator-(Vec a) { return Vec(Eigen::internal::pnegate(a.v), 0); }
  Vec& operator+=(Vec b) { return *this = *this + b; }
};

template <class C>
inline constexpr int kLanes = Vec<C>::kLanes;

// a b + c, rounded once where the machine can.
template <class C>
inline Vec<C> fma(Vec<C> a, Vec<C> b, Vec<C> c) {
  return Vec<C>(Eigen::internal::pmadd(a.v, b.v, c.v), 0);
}

// Masks are vectors of all-ones and all-zeros.
template <class C>
inline Vec<C> less(Vec<C> a, Vec<C> b) {
  return Vec<C>(Eigen::internal::pcmp_lt(a.v, b.v), 0);
}
template <class C>
inline Vec<C> select(Vec<C> mask, Vec<C> a, Vec<C> b) {
  return Vec<C>(Eigen::internal::pselect(mask.v, a.v, b.v), 0);
}

// NaN if either is NaN.
template <class C>
inline Vec<C> max(Vec<C> a, Vec<C> b) {
  return Vec<C>(Eigen::internal::pmax<Eigen::PropagateNaN>(a.v, b.v), 0);
}
template <class C>
inline Vec<C> min(Vec<C> a, Vec<C> b) {
  return Vec<C>(Eigen::internal::pmin<Eigen::PropagateNaN>(a.v, b.v), 0);
}
template <class C>
inline Vec<C> abs(Vec<C> a) {
  return Vec<C>(Eigen::internal::pabs(a.v), 0);
}
template <class C>
inline Vec<C> sqrt(Vec<C> a) {
  return Vec<C>(Eigen::internal::psqrt(a.v), 0);
}

// As many 16- and 32-bit words as a vector of f32 has lanes.
typedef std::uint16_t Words16 __attribute__((vector_size(2 * kLanes<float>)));
typedef std::uint32_t Words32 __attribute__((vector_size(4 * kLanes<float>)));

inline Words32 pick(Words32 mask, Words32 a, Words32 b) { return (mask & a) | (~mask & b); }
inline Vec<float> as_floats(Words32 w) {
  return Vec<float>(std::bit_cast<Vec<float>::Packet>(w), 0);
}
inline Words32 as_words(Vec<float> x) { return std::bit_cast<Words32>(x.v); }

// Loads and stores convert 16-bit floats, rounding to nearest even; see base/dtype.hpp for the
// scalar forms.
template <class T>
inline Vec<Compute<T>> load(const T* p) {
  if constexpr (std::is_class_v<T>) {
    Words16 narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    const Words32 w = __builtin_convertvector(narrow, Words32);
    if constexpr (std::is_same_v<T, BFloat16>) return as_floats(w << 16);
    // Rebasing the exponent by a multiplication makes subnormals exact.
    const Words32 magnitude = (w & 0x7fffu) << 13;
    const Words32 scaled = as_words(as_floats(magnitude) * Vec<float>(0x1p112f));
    const Words32 special = Words32(magnitude >= 0x0f800000u) & 0x7f800000u;
    return as_floats(scaled | special | ((w & 0x8000u) << 16));
  } else {
    return Vec<T>(Eigen::internal::ploadu<typename Vec<T>::Packet>(p), 0);
  }
}

inline Words32 narrow_bits(BFloat16, Vec<float> x) {
  const Words32 u = as_words(x);
  const Words32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return pick(Words32((u & 0x7fffffffu) > 0x7f800000u), (u >> 16) | 0x40u, rounded);
}
// Adding 0.5 rounds a value below 2^-14 to a multiple of 2^-24, the spacing of f16 subnormals.
inline Words32 narrow_bits(Float16, Vec<float> x) {
  const Words32 u = as_words(x), magnitude = u & 0x7fffffffu, rebased = magnitude - 0x38000000u;
  const Words32 normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  const Words32 small = as_words(as_floats(magnitude) + Vec<float>(0.5f)) - 0x3f000000u;
  Words32 bits = pick(Words32(magnitude < 0x38800000u), small, normal);
  bits = pick(Words32(magnitude >= 0x477ff000u), Words32{} + 0x7c00u, bits);
  bits = pick(Words32(magnitude > 0x7f800000u), Words32{} + 0x7e00u, bits);
  return bits | ((u >> 16) & 0x8000u);
}

template <class T>
inline void store(T* p, Vec<Compute<T>> a) {
  if constexpr (std::is_class_v<T>) {
    const Words16 narrow = __builtin_convertvector(narrow_bits(T{}, a), Words16);
    std::memcpy(static_cast<void*>(p), &narrow, sizeof narrow);
  } else {
    Eigen::internal::pstoreu(p, a.v);
  }
}

// rows[i][j] becomes rows[j][i].
template <class C>
inline void transpose(Vec<C> (&rows)[kLanes<C>]) {
  if constexpr (kLanes<C> > 1) {
    Eigen::internal::PacketBlock<typename Vec<C>::Packet, kLanes<C>> block;
    for (int i = 0; i < kLanes<C>; ++i) block.packet[i] = rows[i].v;
    Eigen::internal::ptranspose(block);
    for (int i = 0; i < kLanes<C>; ++i) rows[i].v = block.packet[i];
  }
}

// The first n < kLanes elements; the others are 0.
template <class T>
inline Vec<Compute<T>> load_partial(const T* p, std::int64_t n) {
  alignas(64) T lanes[kLanes<Compute<T>>] = {};
  std::memcpy(static_cast<void*>(lanes), p, static_cast<std::size_t>(n) * sizeof(T));
  return load(lanes);
}
// The same, but the others are `pad`.
template <class T>
inline Vec<Compute<T>> load_padded(const T* p, std::int64_t n, Compute<T> pad) {
  alignas(64) Compute<T> lanes[kLanes<Compute<T>>];
  for (int lane = 0; lane < kLanes<Compute<T>>; ++lane)
    lanes[lane] = lane < n ? static_cast<Compute<T>>(p[lane]) : pad;
  return load(lanes);
}
template <class T>
inline void store_partial(T* p, Vec<Compute<T>> a, std::int64_t n) {
  alignas(64) T lanes[kLanes<Compute<T>>];
  store(lanes, a);
  std::memcpy(static_cast<void*>(p), lanes, static_cast<std::size_t>(n) * sizeof(T));
}

// Calls f(i, io) for i over [0, n) in steps of a vector; io loads and stores whole vectors, or the
// tail's part of one.
struct Full {
  template <class T>
  Vec<Compute<T>> load(const T* p) const {
    return host::load(p);
  }
  template <class T>
  void store(T* p, Vec<Compute<T>> a) const {
    host::store(p, a);
  }
};
struct Partial {
  std::int64_t n;
  template <class T>
  Vec<Compute<T>> load(const T* p) const {
    return load_partial(p, n);
  }
  template <class T>
  void store(T* p, Vec<Compute<T>> a) const {
    store_partial(p, a, n);
  }
};
template <class C, class F>
inline void for_lanes(std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + kLanes<C> <= n; i += kLanes<C>) f(i, Full{});
  if (i < n) f(i, Partial{n - i});
}

template <class C>
inline C sum(Vec<C> a) {
  return Eigen::internal::predux(a.v);
}

}  // namespace tessera::kernels::host

#pragma GCC diagnostic pop
