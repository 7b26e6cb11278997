// Rank 1's loss does not use the weight, so it has no gradient, and leaves the reduction out. The
// next collective of its peers meets another one.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::reduction_left_out(Run& run) {
  run.by_hand([&](Weight& weight) {
    const bool uses = weight.world.rank() == 0;
    weight.backward(uses ? 1 : 0);
    weight.reduces.wait(weight.compute.record());
    if (uses || run.is_mended()) weight.reduce();
    weight.compute.wait(weight.reduces.record());
    weight.update();
  });
}
