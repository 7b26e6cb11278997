// How far values are from those of a golden file.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"

namespace tessera::testing {

inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

}  // namespace tessera::testing
