// 16-byte accesses, and the types in which elements are computed.
//
// Where two sizes of elements meet, as in casts, the wider side moves 16 bytes and the narrower 8
// or 4: neighbouring threads still cover whole sectors of 32 bytes on both sides, and 16 bytes on
// the narrower would make two accesses of the wider touch each sector by halves.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cuda/gpu.hpp"

namespace tessera::kernels::cuda {

template <class F, int... I>
TESSERA_DEVICE void call_each(F& f, std::integer_sequence<int, I...>) {
  (f(I), ...);
}
// f(0), f(1), .. f(N - 1) as straight code: arrays indexed by the argument stay in registers, also
// where a compiler would keep the loop.
template <int N, class F>
TESSERA_DEVICE void unrolled(F f) {
  call_each(f, std::make_integer_sequence<int, N>{});
}

// f64 computes in f64, every other floating type in f32.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

TESSERA_DEVICE float load_as_compute(const float& x) { return x; }
TESSERA_DEVICE double load_as_compute(const double& x) { return x; }
TESSERA_DEVICE float load_as_compute(const BFloat16& x) { return to_float(x); }
TESSERA_DEVICE float load_as_compute(const Float16& x) { return to_float(x); }
template <int kExponentBits>
TESSERA_DEVICE float load_as_compute(const Float8<kExponentBits>& x) {
  return x;
}

// The floating `value` rounded once to T.
template <class T>
TESSERA_DEVICE T rounded(Compute<T> value) {
  if constexpr (sizeof(T) == 2) {
    T out;
    from_float(value, out);
    return out;
  } else {
    return T(value);
  }
}

// N elements that move in one access; N sizeof(T) is a power of two up to 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
// Elements of one 16-byte access.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
TESSERA_DEVICE Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <class T, int N>
TESSERA_DEVICE void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Element j of those that lie in words.
template <class T>
TESSERA_DEVICE T element_of(const std::uint32_t* words, int j) {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<T>(words[2 * j] | static_cast<std::uint64_t>(words[2 * j + 1]) << 32);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(words[j]);
  } else {
    constexpr int kEach = 4 / static_cast<int>(sizeof(T));
    using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>;
    return std::bit_cast<T>(static_cast<Bits>(words[j / kEach] >> j % kEach * (32 / kEach)));
  }
}

// Elements of less than 32 bits in words. A branch or a loop that passes a Pack of them on has the
// compiler take it apart there, which waits for the load; words it passes on as they are.
template <class T, int N>
struct alignas(sizeof(T) * N) PackInWords {
  static constexpr int kBits = 8 * static_cast<int>(sizeof(T)), kEach = 32 / kBits;
  using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>;
  std::uint32_t words[N / kEach];

  PackInWords() = default;
  TESSERA_DEVICE PackInWords(const Pack<T, N>& pack) : words{} {
    for (int j = 0; j < N; ++j)
      words[j / kEach] |= std::uint32_t{std::bit_cast<Bits>(pack.at[j])} << j % kEach * kBits;
  }
  TESSERA_DEVICE operator Pack<T, N>() const {
    Pack<T, N> pack;
    for (int j = 0; j < N; ++j) pack.at[j] = element_of<T>(words, j);
    return pack;
  }
};
// A pack that is looked into later: other loads start before it is there.
template <class T, int N>
using Held = std::conditional_t<sizeof(T) < 4 && sizeof(T) * N >= 4, PackInWords<T, N>, Pack<T, N>>;

// Element j of what is held, as it is computed with.
template <class T, int N>
TESSERA_DEVICE Compute<T> value_of(const Held<T, N>& held, int j) {
  if constexpr (std::is_same_v<Held<T, N>, Pack<T, N>>)
    return load_as_compute(held.at[j]);
  else
    return load_as_compute(element_of<T>(held.words, j));
}

// The numbers f(0) .. f(N - 1), each rounded once to T, two by two where T is short.
template <class T, int N, class F>
TESSERA_DEVICE Held<T, N> held_of(F f) {
  Held<T, N> held;
  if constexpr (sizeof(T) == 4) {
    for (int j = 0; j < N; ++j) held.at[j] = f(j);
  } else {
    for (int w = 0; w < N * static_cast<int>(sizeof(T)) / 4; ++w)
      if constexpr (sizeof(T) == 2)
        held.words[w] = pair_of<T>(f(2 * w), f(2 * w + 1));
      else
        held.words[w] = pair_of<T>(f(4 * w), f(4 * w + 1)) | pair_of<T>(f(4 * w + 2), f(4 * w + 3))
                                                                 << 16;
  }
  return held;
}

template <int N, class T>
TESSERA_DEVICE Held<T, N> load_held(const T* from) {
  return load_whole<Held<T, N>>(from);
}

// The largest magnitudes of packs, place by place, as 0 to begin with; a NaN is none.
template <class T, int N>
TESSERA_DEVICE void add_magnitudes(Held<T, N>& most, const Held<T, N>& pack) {
  if constexpr (sizeof(T) == 2 && N > 1)
    for (int w = 0; w < N / 2; ++w)
      most.words[w] = larger_magnitudes<T>(most.words[w], pack.words[w]);
  else
    for (int j = 0; j < N; ++j)
      most.at[j] =
          rounded<T>(std::fmax(load_as_compute(most.at[j]), std::abs(load_as_compute(pack.at[j]))));
}
// The largest of all places.
template <class T, int N>
TESSERA_DEVICE float largest_of(Held<T, N> most) {
  if constexpr (sizeof(T) == 2 && N > 2)
    for (int w = 1; w < N / 2; ++w)
      most.words[0] = larger_magnitudes<T>(most.words[0], most.words[w]);
  constexpr int kLeft = sizeof(T) == 2 && N > 2 ? 2 : N;
  const Pack<T, N> pack = most;
  float largest = load_as_compute(pack.at[0]);
  for (int j = 1; j < kLeft; ++j) largest = std::fmax(largest, load_as_compute(pack.at[j]));
  return largest;
}

// A pack of elements of less than 32 bits, in one access.
template <class T, int N>
TESSERA_DEVICE void store_held(T* to, const PackInWords<T, N>& pack) {
  *reinterpret_cast<PackInWords<T, N>*>(to) = pack;
}

// Of `count` elements from `from` on, those before the first 16-byte boundary.
template <class T>
TESSERA_DEVICE int elements_before_boundary(const T* from, int count) {
  const auto bytes = static_cast<int>(-reinterpret_cast<std::uintptr_t>(from) & 15);
  const int head = bytes / static_cast<int>(sizeof(T));
  return head < count ? head : count;
}

// Whether 16-byte accesses may start at every address, and at a stride of `bytes` from it. For
// launchers, which fall back to accesses of one element.
template <class... P>
bool are_aligned(const P*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace tessera::kernels::cuda
