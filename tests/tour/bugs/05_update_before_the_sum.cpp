// The optimizer reads the reduced gradient, and nobody has waited for the reduction.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::update_before_the_sum(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.write();
    weight.backward(1);
    weight.reduces.wait(weight.compute.record());
    weight.reduce();
    if (run.is_mended()) weight.compute.wait(weight.reduces.record());
    weight.update();
  });
}
