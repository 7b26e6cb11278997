// FSDP2's tests of stream safety: four steps of three MLPs under the race checker, in every way to
// take one, where streams run as threads and as a seed says. That the checker finds what is missing
// show tests/promises/mutants_test and tests/device/race_checker_test.
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/accumulation.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Racing {
  const char* name;
  ShardOptions options;
  int micro_batches = 1;
  bool in_chunks = false;
  Accumulation accumulation = Accumulation::reduced;
  int replicas = 1;
};

struct RacedMlps final : nn::Module {
  RacedMlps() {
    for (int i = 0; i < 3; ++i) mlps.emplace_back(std::vector<std::int64_t>{6, 12, 6});
    register_module("mlps", mlps);
    register_module("head", head);
  }
  void shard(const ShardOptions& options) {
    for (Mlp& mlp : mlps) fully_shard(mlp, options);
    shard_each({&head, this}, options);
  }
  Tensor trunk(const Tensor& x) {
    return call(
        [&](Tensor h) {
          for (Mlp& mlp : mlps) h = mlp(h);
          return h;
        },
        x);
  }
  Tensor loss(const Tensor& x) { return mean_square(cast(head(trunk(x)), f32)); }
  // Each chunk goes backward at once, through a unit that the model's call leaves out.
  void chunks(const Tensor& x) {
    const Tensor h = trunk(x);
    Tensor cut = h.detach();
    cut.require_grad();
    for (int chunk = 0; chunk < 2; ++chunk)
      mean_square(cast(head(slice(cut, 0, 2 * chunk, 2 * chunk + 2)), f32)).backward();
    h.backward(cut.grad());
  }
  nn::ModuleList<Mlp> mlps;
  nn::Linear head{6, 6};
};

}  // namespace

TEST_CASE("no step of three MLPs has a race, and none has other bits for its schedule",
          "[threads][fsdp2-115][fsdp2-116][fsdp2-117][fsdp2-118][fsdp2-119]") {
  const World nowhere = World::single();
  const DeviceMesh mesh = DeviceMesh::flat(nowhere);
  const Racing table[] = {
      {"plain", {.mesh = mesh}},
      {"micro-batches", {.mesh = mesh}, 2},
      {"unsharded micro-batches", {.mesh = mesh}, 2, false, Accumulation::unsharded},
      {"micro-batches in replicas", {.mesh = mesh}, 2, false, Accumulation::in_replicas, 2},
      {"two reductions in flight", {.mesh = mesh, .reductions_in_flight = 2, .piece_bytes = 64}},
      {"bf16", {.mesh = mesh, .precision = {.param = bf16}}},
      {"resharded", {.mesh = mesh, .reshard_after_forward = Reshard::always}},
      {"kept", {.mesh = mesh, .reshard_after_forward = Reshard::never}},
      {"in chunks", {.mesh = mesh}, 1, true}};
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const Racing& way : table) {
    INFO(way.name);
    const auto train = [&](const WorldOptions& world_options) {
      return on_ranks(2 * way.replicas, world_options, [&](World& world) {
        ShardOptions options = way.options;
        options.mesh = mesh_of(world, way.replicas);
        RacedMlps model;
        model.shard(options);
        nn::init(model, {1}, world.device());
        optim::AdamW optimizer(model.parameters(), {.lr = 0.01});
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < way.micro_batches; ++micro) {
            const Tensor x = rows_of(2, 8 * step + 4 * world.rank(), 4, 6, world.device());
            begin_micro_batch(model, way.accumulation, micro + 1 == way.micro_batches);
            way.in_chunks ? model.chunks(x) : model.loss(x).backward();
          }
          optimizer.step();
          optimizer.zero_grad();
        }
        return full_values(model);
      });
    };
    const auto threads = train({.threads = 1});
    for (const std::uint64_t schedule : {seed, seed + 1}) {
      const auto shuffled = train({.executor = testing::shuffled(schedule), .threads = 1});
      for (std::size_t rank = 0; rank < threads.size(); ++rank)
        CHECK(same_bits(threads[rank], shuffled[rank]));
    }
  }
}
