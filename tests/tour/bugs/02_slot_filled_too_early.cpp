// The next layer is gathered into the memory of the one that still computes: its shard was "freed"
// when the host had queued its last use, not when that had run.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::slot_filled_too_early(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.write();
    weight.gathers.wait(weight.compute.record());
    for (int layer = 0; layer < 2; ++layer) {
      weight.gather();
      weight.compute.wait(weight.gathers.record());
      weight.use();
      if (run.is_mended()) weight.gathers.wait(weight.compute.record());
    }
  });
}
