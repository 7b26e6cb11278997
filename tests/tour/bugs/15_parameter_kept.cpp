// A module keeps its full weight for later. Behind the call another layer's lies in that memory.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::parameter_kept(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    Tensor kept;
    const NoGradGuard guard;
    model.layer.call([&] {
      const Tensor full = model.layer.weight.value();
      kept = run.is_mended() ? raw::mul(full, 1) : full;  // a copy is the program's own
      return full.numel();
    });
  });
}
