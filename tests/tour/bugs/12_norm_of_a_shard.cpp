// Gradients are clipped to the norm 1. A rank has rows of them, and their norm is not that of all.
#include "tests/tour/bugs/bugs.hpp"

#include <cmath>

void tessera::tour::norm_of_a_shard(Run& run) {
  run.by_hand([&](Weight& weight) {
    raw::fill(weight.gradient, 2 * (weight.world.rank() + 1));
    const auto squares = [&] {
      double of_rows = 0;
      for (const float g : weight.gradient.to_vector<float>()) of_rows += g * g;
      return of_rows;
    };
    const double norm = std::sqrt(run.is_mended() ? weight.world.sum(squares()) : squares());
    raw::axpby(weight.gradient, weight.gradient, 1 / norm, 0);
    const double clipped = std::sqrt(weight.world.sum(squares()));
    // Eight products and a sum, each rounded in f32.
    run.expect(std::abs(clipped - 1) < 1e-6,
               concat("the norm is ", clipped, " after clipping to 1"));
  });
}
