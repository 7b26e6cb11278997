// Rank 0 alone writes files, so it alone asks for the full weights. They are gathered from all
// ranks.
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::collective_of_rank_0(Run& run) {
  run.on_ranks([&](World& world) {
    OneWeight model(world);
    const auto write = [&](const std::string&, const Tensor& full) {
      if (world.rank() == 0) full.to_vector<float>();
    };
    if (world.rank() == 0 || run.is_mended()) for_each_full_parameter(model, write);
  });
}
