// Backward adds to the gradient that is there. Without zero_grad the second step has the first
// one's gradient, too.
#include "tessera/autograd/ops.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::gradients_never_cleared(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    optim::SGD optimizer(model.parameters(), {.lr = 0.25});
    for (int step = 0; step < 2; ++step) {
      sum(model(column(world, {1}))).backward();
      optimizer.step();
      if (run.is_mended()) optimizer.zero_grad();
    }
    const double got = model.weight();
    run.expect(got == 0.5, concat("the weight is ", got, " after two steps of 0.25 from 1"));
  });
}
