// Rank 1's loss is no number, and it leaves its backward out. Its peer's reduction waits for it.
#include "tessera/autograd/ops.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::backward_left_out(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    const Tensor loss = sum(model(column(world, {1})));
    if (world.rank() == 0)
      loss.backward();
    else if (run.is_mended())
      skip_backward(loss);
    world.sum(1);  // the next that all of them do
  });
}
