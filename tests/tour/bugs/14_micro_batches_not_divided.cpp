// Two micro-batches stand for one batch, so their losses are halves of its loss. Added as they are,
// they make the step twice as long.
#include "tessera/autograd/ops.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::micro_batches_not_divided(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    constexpr int kMicroBatches = 2;
    for (const float sample : {2.f, 4.f})
      (sum(model(column(world, {sample}))) / (run.is_mended() ? kMicroBatches : 1)).backward();
    const double got = model.gradient();
    run.expect(got == 3, concat("the gradient is ", got, ", and of one batch of both samples 3"));
  });
}
