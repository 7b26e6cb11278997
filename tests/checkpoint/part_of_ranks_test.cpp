// Models of which ranks have parts: what is gathered over a part of the world's ranks, or lies on
// some alone.
#include <filesystem>

#include "tessera/checkpoint/model.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("weights on a part of the world's ranks are not saved, and every rank hears of it",
          "[threads]") {
  const TemporaryFolder folder;
  enum class Way { lines_of_a_grid, stages, one_stage };
  const auto way = GENERATE(Way::lines_of_a_grid, Way::stages, Way::one_stage);
  for (const std::string& said : on_ranks(4, [&](World& world) {
         Stack model({4, 4, 4});
         const DeviceMesh grid = DeviceMesh::grid(world, {{"dp", 2}, {"ep", 2}});
         const int stage = world.rank() / 2;
         if (way == Way::lines_of_a_grid)
           fully_shard(model, {.mesh = grid["dp"]});
         else if (way == Way::stages || stage == 0)
           fully_shard(model.layers[static_cast<std::size_t>(stage)], {.mesh = grid["ep"]});
         model.materialize(world.device());
         nn::init(model, {1});
         return thrown_by([&] { checkpoint::save_weights(folder / "model", model, world); });
       }))
    CHECK(has(said, "' lies on 2 of the world's 4 ranks"));
  CHECK(folder.entries() == 0);
}

TEST_CASE("a model that has no memory on one rank is not saved, and every rank hears of it",
          "[threads]") {
  const TemporaryFolder folder;
  for (const std::string& said : on_ranks(3, [&](World& world) {
         Stack model({4, 4});
         if (world.rank() != 1) nn::init(model, {1}, world.device());
         return thrown_by([&] { checkpoint::save_weights(folder / "model", model, world); });
       }))
    CHECK(has(said, "call materialize on the model first"));
  CHECK(folder.entries() == 0);
}

TEST_CASE("a stage's units are whole in the state of its ranks, and of the first alone",
          "[threads]") {
  const auto found = on_ranks(4, [](World& world) {
    Stack model({4, 4, 4});
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"pp", 2}, {"dp", 2}})["dp"];
    const auto stage = static_cast<std::size_t>(world.rank() / 2);
    fully_shard(model.layers[stage], {.mesh = mesh});
    model.materialize(world.device());
    nn::init(model, {1});
    const Values expected = full_values(model.layers[stage]);
    for (const StateRanks ranks : {StateRanks::every_rank, StateRanks::rank_0}) {
      const StateDict state = model.state_dict({StateForm::full, ranks});
      if (ranks == StateRanks::rank_0 && mesh.shard_rank() != 0) {
        if (!state.empty()) return false;
        continue;
      }
      for (const auto& [name, values] : expected) {
        const auto at = state.find(concat("layers.", stage, '.', name));
        if (at == state.end() || !same_bits(at->second.values.to_vector<float>(), values))
          return false;
      }
    }
    return true;
  });
  CHECK(found == std::vector<bool>(4, true));
}
