// What the tests of clipping clip.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "tests/optim/helpers.hpp"

namespace tessera::testing {

inline const std::vector<Shape> kClippedShapes{{50, 7}, {3}, {300}};

inline std::map<std::size_t, Values> random_gradients(Draw& draw, float low, float high) {
  std::map<std::size_t, Values> out;
  for (std::size_t i = 0; i < kClippedShapes.size(); ++i)
    out[i] = draw.values(kClippedShapes[i].numel(), low, high);
  return out;
}

}  // namespace tessera::testing
