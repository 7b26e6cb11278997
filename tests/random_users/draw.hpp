// Random choices from a seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>

#include "tessera/tensor/shape.hpp"

namespace tessera::testing {

class Draw {
 public:
  // Mixed, since neighbouring seeds are used for what belongs to one trial.
  explicit Draw(std::uint64_t seed) : engine_(seed * 0x9e3779b97f4a7c15u + 1) {}

  std::uint64_t bits() { return engine_(); }
  // From low to high, both included.
  std::int64_t whole(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  int number(int low, int high) { return static_cast<int>(whole(low, high)); }
  double real(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  bool chance(double p) { return real(0, 1) < p; }
  template <class Values>
  auto& one_of(Values&& values) {
    return values[static_cast<std::size_t>(whole(0, std::ssize(values) - 1))];
  }
  template <class Values>
  void shuffle(Values& values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[bits() % i]);
  }
  // Small: sizes to 5, 1 and 0 among them.
  Shape shape(int least_dims, int most_dims) {
    Shape out;
    for (int d = number(least_dims, most_dims); d > 0; --d)
      out.push_back(chance(0.05) ? 0 : chance(0.2) ? 1 : whole(2, 5));
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
