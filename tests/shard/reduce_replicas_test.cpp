// Parts of a mesh that replicate each other: sums over replicas, piece by piece, beside shards.
#include "tessera/comm/mesh.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// What two steps of two micro-batches leave on a rank, of a gradient before the first update too.
struct Trained {
  Values gradients, parameters;  // whole
  double norm = 0;
  ShardCounters counters;
};

Trained train_rows(World& world, const DeviceMesh& mesh, const ShardOptions& options) {
  Stack model({5, 7, 1, 3});
  ShardOptions own = options;
  own.mesh = mesh;
  model.shard(own);
  model.materialize(world.device());
  make_positive(model);
  nn::init(model, {11});
  optim::SGD optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.5});
  Trained trained;
  const int rows = 8 / world.size();
  for (int step = 0; step < 2; ++step) {
    for (int micro = 0; micro < 2; ++micro)
      mean_square(model(positive_rows(5, 16 * step + 8 * micro + rows * world.rank(), rows, 5,
                                      world.device())))
          .backward();
    if (step == 0)
      for (const auto& [name, p] : model.named_parameters())
        trained.gradients[name] = p.distributed_grad().full().to_vector<float>();
    trained.norm = optim::clip_grad_norm(model.parameters(), 0.001).item();
    optimizer.step();
    optimizer.zero_grad();
  }
  trained.parameters = full_values(model);
  trained.counters = shard_counters(model);
  return trained;
}

}  // namespace

TEST_CASE("replicas of shards train as one rank does, and stay equal to the bit",
          "[threads][fsdp2-046][fsdp2-115]") {
  const auto [replicas, shards] =
      GENERATE(std::pair(2, 2), std::pair(4, 1), std::pair(2, 1), std::pair(1, 4), std::pair(2, 4));
  // A piece each, all in one; a wire of 16 bits rounds 2^-9 where f32 rounds 2^-24, once more for
  // the sum over replicas, and terms are of one sign.
  const std::int64_t piece = GENERATE(std::int64_t{1}, std::int64_t{32} << 20);
  const bool is_16_bit = GENERATE(false, true);
  const ShardOptions options{
      .mesh = DeviceMesh::flat(World::single()),
      .precision = {.param = is_16_bit ? std::optional(bf16) : std::nullopt,
                    .reduce = is_16_bit ? std::optional(bf16) : std::nullopt},
      .piece_bytes = piece};
  CAPTURE(replicas, shards, piece, is_16_bit);
  const auto on_mesh = [&, replicas = replicas, shards = shards](bool is_hybrid) {
    return on_ranks(replicas * shards, [&](World& world) {
      return train_rows(world,
                        is_hybrid
                            ? DeviceMesh::hybrid(world, {.replicate = replicas, .shard = shards})
                            : DeviceMesh::flat(world),
                        options);
    });
  };
  const Trained alone = on_ranks(
      1, [&](World& world) { return train_rows(world, DeviceMesh::flat(world), options); })[0];
  const std::vector<Trained> flat = on_mesh(false), ranks = on_mesh(true);
  // Sums of equal terms in another order: those of a rank's replica first. In 16 bits a gradient is
  // rounded when it is written, when it is sent, once more for each of both sums, and micro-batches
  // add up in f32: 2^-8 for each, on either side.
  const double most = is_16_bit ? 2 * 4 * 0x1p-8 : kRounding;
  for (const Trained& rank : ranks) {
    CHECK(same_bits(rank.parameters, ranks[0].parameters));
    CHECK(same_bits(rank.gradients, ranks[0].gradients));
    CHECK(rank.norm == ranks[0].norm);
    CHECK(distance(flat[0].gradients, rank.gradients) < most);
    if (!is_16_bit) CHECK(distance(alone.gradients, rank.gradients) < most);
    // Three layers and the root, forwards and backwards of four micro-batches.
    CHECK(rank.counters.reductions == 4 * 4);
    CHECK(rank.counters.all_reduces == (replicas > 1 ? rank.counters.reductions : 0));
    CHECK((rank.counters.gathers > 0) == (shards > 1));
  }
  if (replicas == 1) CHECK(same_bits(flat[0].parameters, ranks[0].parameters));
}

TEST_CASE("gradients of replicas travel over the stream that their dimension names") {
  const World world = World::emulated(0, 8);
  const bool is_apart = GENERATE(true, false);
  const DeviceMesh mesh = is_apart
                              ? DeviceMesh::hybrid(world, {.replicate = 4, .shard = 2})
                              : DeviceMesh::grid(world, {{"dp_replicate", 4}, {"dp_shard", 2}});
  CHECK((mesh.replicate_group()->reduce().stream() == StreamId::replicate) == is_apart);
  Stack model({64, 64, 64, 64});
  model.shard({.mesh = mesh, .piece_bytes = 1});
  model.materialize(world.device());
  const Tensor x = Tensor::zeros({4, 64}, f32, world.device());
  mean_square(model(x)).backward();
  const std::uint64_t before = mesh.replicate_group()->reduce().submitted();
  mean_square(model(x)).backward();
  // Layers have a weight and a bias, the root a scale and an offset: a piece each.
  CHECK(mesh.replicate_group()->reduce().submitted() - before == 2 * 4);
  CHECK(shard_plan(model).replicas == 4);
  CHECK_THAT(shard_plan(model).to_string(), Contains("plan for 2 ranks, in 4 replicas"));
}

TEST_CASE("replicas that differ become equal by a broadcast among them", "[threads][fsdp2-020]") {
  const auto found = on_ranks(4, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
    Stack model({5, 3});
    model.shard({.mesh = mesh});
    nn::init(model, {static_cast<std::uint64_t>(world.rank() / 2)},
             world.device());  // of the replica
    const Values before = full_values(model);
    for (Parameter& p : model.parameters())
      p.edit([&](const Tensor& rows) {
        raw::copy_into(rows, dist::broadcast(rows, 0, *mesh.replicate_group()));
      });
    optim::SGD optimizer(model.parameters(), {.lr = 0.1});
    const Values equal = full_values(model);
    mean_square(model(rows_of(3, world.rank(), 1, 5, world.device()))).backward();
    optimizer.step();
    return std::array{before, equal, full_values(model)};
  });
  CHECK(!same_bits(found[0][0], found[2][0]));
  for (const auto& [before, equal, trained] : found) {
    CHECK(same_bits(equal, found[0][0]));
    CHECK(same_bits(trained, found[0][2]));
    CHECK(!same_bits(trained, equal));
  }
}

TEST_CASE("handles of replicas say so, and hold the rows of their shard", "[threads]") {
  const auto found = on_ranks(4, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
    Stack model({5, 3});
    model.shard({.mesh = mesh});
    nn::init(model, {3}, world.device());
    const DistributedTensor weight = model.layers[0].weight.distributed();
    const StateDict full = model.state_dict({.form = StateForm::full, .ranks = StateRanks::rank_0});
    return std::tuple(weight.to_string(), weight.rows().begin, weight.full().to_vector<float>(),
                      full.size());
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto& [text, first, whole, kept] = found[rank];
    CHECK_THAT(text, Contains("Replicate over dp_replicate 2") && Contains("over dp_shard 2"));
    CHECK(first == (rank % 2 == 0 ? 0 : 2));
    CHECK(whole == std::get<2>(found[0]));
    CHECK(kept == (rank == 0 ? 4 : 0));
  }
}

TEST_CASE("replicas that a step has left half done go on after a reset", "[threads]") {
  const auto steps = [](bool fails) {
    return on_ranks(4, [&](World& world) {
      Stack model({5, 7, 3});
      model.shard({.mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2})});
      nn::init(model, {7}, world.device());
      optim::SGD optimizer(model.parameters(), {.lr = 0.1});
      bool has_failed = !fails;
      while (optimizer.steps() < 3) {
        try {
          const Tensor x = rows_of(9, 2 * world.rank(), 2, 5, world.device());
          const Tensor loss = mean_square(model(x));
          if (world.rank() == 2 && optimizer.steps() == 1 && !std::exchange(has_failed, true))
            throw DataError("no more rows");
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          world.device().synchronize();
          world.barrier();  // nobody is in an update when rank 2 fails
        } catch (const std::exception&) {
          if (!reset(model).parameters_are_consistent) throw;
        }
      }
      return full_values(model);
    });
  };
  const auto failed = steps(true), calm = steps(false);
  for (const Values& values : failed) CHECK(same_bits(values, calm[0]));
}
