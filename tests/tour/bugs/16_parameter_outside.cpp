// A penalty on the weights is made outside of the module that has them: there a rank has its rows,
// and no full tensor.
#include "tessera/autograd/ops.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::parameter_outside(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    const auto penalty = [&] {
      const Tensor w = model.layer.weight;
      return sum(w * w);
    };
    const Tensor loss = run.is_mended() ? model.layer.call(penalty) : penalty();
    loss.backward();
  });
}
