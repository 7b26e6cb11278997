// Gradients of 16 bits are summed as they are. bf16 has 8 bits of value: 128 + 0.5 is 128 there.
#include "tessera/autograd/ops.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::cast_before_the_sum(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world, {.param = bf16, .reduce = run.is_mended() ? f32 : bf16});
    sum(model(column(world, {world.rank() == 0 ? 256.f : 1.f}))).backward();
    const double got = model.gradient();
    run.expect(got == 128.5, concat("the gradient is ", got, ", and of one rank 128.5"));
  });
}
