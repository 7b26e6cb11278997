// Philox4x32-10, a counter-based random generator. The value at an index depends on (key, index)
// only. So initial values and dropout are the same for any number of ranks or threads, and any
// order of evaluation.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

// Four 32-bit words for a 64-bit key and a 128-bit counter {low, high}.
constexpr std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t low,
                                              std::uint64_t high = 0) {
  std::uint32_t c0 = static_cast<std::uint32_t>(low), c1 = static_cast<std::uint32_t>(low >> 32),
                c2 = static_cast<std::uint32_t>(high), c3 = static_cast<std::uint32_t>(high >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// The known answer of the reference implementation for counter 0, key 0 (Random123, kat_vectors).
static_assert(philox(0, 0) ==
              std::array<std::uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});

// A uniform float in [0, 1) from the upper 24 bits of a word.
constexpr float unit_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// 64-bit FNV-1a, which derives a key from (seed, name). It is stable over runs, machines and
// compilers.
constexpr std::uint64_t fnv1a(std::string_view text, std::uint64_t seed = 0xcbf29ce484222325ull) {
  for (const char c : text) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return seed;
}
constexpr std::uint64_t fnv1a(std::uint64_t word, std::uint64_t seed) {
  for (int i = 0; i < 8; ++i) seed = (seed ^ ((word >> (8 * i)) & 0xffu)) * 0x100000001b3ull;
  return seed;
}

}  // namespace tessera
