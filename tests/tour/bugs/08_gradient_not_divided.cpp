// The sum over the ranks is taken for their mean: the step is as many times too long as there are
// ranks.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::gradient_not_divided(Run& run) {
  run.by_hand([&](Weight& weight) {
    const double own = weight.world.rank() + 1;  // this rank's gradient, 1 or 2
    weight.backward(run.is_mended() ? own / weight.world.size() : own);
    weight.reduces.wait(weight.compute.record());
    weight.reduce();
    weight.compute.wait(weight.reduces.record());
    const float got = weight.gradient.to_vector<float>().front();
    run.expect(got == 1.5f, concat("the gradient is ", got, ", and of one rank 1.5"));
  });
}
