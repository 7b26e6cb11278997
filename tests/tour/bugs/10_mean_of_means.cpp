// Rank 0 has three samples and rank 1 has one. Each makes the mean of its own, and the ranks' means
// are averaged: the one sample counts as much as the three.
#include "tessera/autograd/ops.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::mean_of_means(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    const std::vector<float> samples =
        world.rank() == 0 ? std::vector<float>{1, 1, 1} : std::vector<float>{5};
    const auto own = static_cast<double>(samples.size());
    const double counted = run.is_mended() ? world.sum(own) / world.size() : own;
    (sum(model(column(world, samples))) / counted).backward();
    const double got = model.gradient();
    run.expect(got == 2, concat("the gradient is ", got, ", and of one rank with all samples 2"));
  });
}
