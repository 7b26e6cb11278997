// Two layers share one buffer of unreduced gradients. Backward of the second writes there while a
// peer still reads what the first has left.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::gradient_overwritten(Run& run) {
  run.by_hand([&](Weight& weight) {
    for (int layer = 0; layer < 2; ++layer) {
      weight.backward(layer);
      weight.reduces.wait(weight.compute.record());
      weight.reduce();
      if (run.is_mended()) weight.compute.wait(weight.reduces.record());
    }
  });
}
