// The first gather of a step reads the shard while the optimizer of the step before still writes
// it.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::gather_before_the_update(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.write();
    if (run.is_mended()) weight.gathers.wait(weight.compute.record());
    weight.gather();
    weight.compute.wait(weight.gathers.record());
    weight.use();
  });
}
