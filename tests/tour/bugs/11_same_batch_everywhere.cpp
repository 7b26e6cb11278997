// Every rank draws its batch from the same seed, so that two ranks learn what one would.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::same_batch_everywhere(Run& run) {
  run.on_ranks([&](World& world) {
    const auto seed = static_cast<std::uint64_t>(run.is_mended() ? world.rank() : 0);
    const Tensor batch = Tensor::normal({4, 1}, 0, 1, seed, f32, world.device());
    const double own = batch.to_vector<float>().front();
    run.expect(world.sum(own) != 2 * own, "both ranks have the same batch");
  });
}
