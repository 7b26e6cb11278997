// Both ranks go on from saved state. One of them loads it behind its first step, and so its rows
// lack that step: the model is of two trainings.
#include "tessera/autograd/ops.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::loaded_too_late(Run& run) {
  run.on_ranks([&](World& world) {
    nn::Linear layer(1, 2, {.bias = false});  // a row for each rank
    fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
    layer.materialize(world.device());
    layer.weight.edit([](const Tensor& row) { raw::fill(row, 1); });
    optim::SGD optimizer(layer.parameters(), {.lr = 0.25});
    const StateDict saved = layer.state_dict();
    const bool is_late = world.rank() == 1 && !run.is_mended();
    if (!is_late) layer.load(saved);
    sum(layer(column(world, {1}))).backward();
    optimizer.step();
    if (is_late) layer.load(saved);
    const double row = layer.weight.shard().to_vector<float>().front(), both = world.sum(row);
    run.expect(both == 1.5,
               concat("the rows are ", both - row, " and ", row, ", of one rank 0.75"));
  });
}
