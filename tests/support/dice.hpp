// Small choices from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace tessera::testing {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  bool once_in(int n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> some) {
    return some.begin()[below(static_cast<int>(some.size()))];
  }
  template <class T>
  T& of(std::vector<T>& some) {
    return some[static_cast<std::size_t>(below(static_cast<int>(some.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
