// Models that are sharded over a part of the world.
#include "tessera/comm/mesh.hpp"

#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Two steps over a mesh of one dimension, on rows that its ranks share.
Values train_over(const DeviceMesh& mesh) {
  Stack model({5, 7, 1, 3});
  model.shard({.mesh = mesh});
  model.materialize(mesh.world().device());
  nn::init(model, {11});
  optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
  for (int step = 0; step < 2; ++step) {
    mean_square(model(rows_of(5, 8 * step + 2 * mesh.shard_rank(), 2, 5, mesh.world().device())))
        .backward();
    optim::clip_grad_norm(model.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  return full_values(model, mesh.group());
}

}  // namespace

TEST_CASE("a model sharded over a part of the world trains as over a world of as many ranks",
          "[threads][fsdp2-019]") {
  Values alone;
  run_checked(2, {.threads = 1}, [&](World& world) {
    const Values values = train_over(DeviceMesh::flat(world));
    if (world.rank() == 0) alone = values;
  });
  std::vector<Values> parts(4);
  run_checked(4, {.threads = 1}, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"pp", 2}, {"dp_shard", 2}});
    parts[static_cast<std::size_t>(world.rank())] = train_over(mesh["dp_shard"]);
  });
  REQUIRE(!alone.empty());
  for (const Values& part : parts) CHECK(part == alone);
}

TEST_CASE("a mesh of two dimensions is refused with the remedy") {
  const World world = World::emulated(0, 4);
  const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
  Stack model({5, 3});
  CHECK_THAT(contract_error([&] { fully_shard(model, {.mesh = mesh}); }),
             Contains("dp_replicate 2 x dp_shard 2 has a group for each dimension; choose one"));
  Stack part({5, 3});
  fully_shard(part, {.mesh = mesh["dp_shard"]});
  part.materialize(world.device());
  CHECK_THAT(contract_error([&] { full_values(part, world); }),
             Contains("is sharded over 2 ranks, but group 'world' has 4; give the group of its"));
}
