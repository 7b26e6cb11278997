// A reduction is queued where backward has queued the gradient, and does not wait for it.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::reduction_too_early(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.backward(1);
    if (run.is_mended()) weight.reduces.wait(weight.compute.record());
    weight.reduce();
    weight.compute.wait(weight.reduces.record());
    weight.update();
  });
}
