// A gather is queued, and the product that reads its result as well. They are on two streams, and
// nothing says that one comes behind the other.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::gather_too_early(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.write();
    weight.gathers.wait(weight.compute.record());
    weight.gather();
    if (run.is_mended()) weight.compute.wait(weight.gathers.record());
    weight.use();
  });
}
