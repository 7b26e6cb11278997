// Parameters sharded along another dimension than that of rows: ShardOptions::shard_placement_fn.
#include "tessera/autograd/recompute.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/scaled_training.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Matrices of [6, 4] and [4, 6], and a tensor of three dimensions.
struct PlacedNet final : Scaled {
  PlacedNet() : Scaled(4, 6, {2, 12, 4}) {}
};

// The last dimension that the ranks divide; of three the middle one.
auto placed(int ranks) {
  return [ranks](const Parameter& p) {
    const Shape& shape = p.shape();
    if (shape.ndim() == 3) return Shard{1};
    return shape.ndim() == 2 && shape[1] % ranks == 0 ? Shard{-1} : Shard{};
  };
}

Values train_placed(const World& world, const ScaledWay& way, std::uint64_t seed) {
  PlacedNet net;
  train_scaled(net, world, way, seed, placed(world.size() / way.replicas));
  return full_values(net);
}

}  // namespace

// Weights of a step of SGD are positive ones less a thousandth of gradients that are as near as
// kRounding, so they are nearer.
TEST_CASE("shards of any dimension are trained as on one rank",
          "[threads][fsdp2-023][fsdp2-031][fsdp2-040]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const ScaledWay ways[] = {{.has_values = true},
                            {.reshard = Reshard::always, .is_recomputed = true},
                            {.reshard = Reshard::never, .accumulates = true},
                            {.reduces_once = true},
                            {.offload = Offload::cpu, .accumulates = true}};
  for (const ScaledWay& way : ways) {
    const Values one = on_ranks(1, [&](World& world) { return train_placed(world, way, seed); })[0];
    for (const int ranks : {2, 3, 4}) {
      INFO(ranks << " ranks, way " << &way - ways);
      for (const Values& rank :
           on_ranks(ranks, [&](World& world) { return train_placed(world, way, seed); }))
        CHECK(distance(one, rank) < kRounding);
    }
  }
  const Values one = on_ranks(1, [&](World& world) { return train_placed(world, {}, seed); })[0];
  for (const ScaledWay& way : {ScaledWay{.replicas = 2}, ScaledWay{.reshard = Reshard::to(2)}})
    for (const Values& rank :
         on_ranks(4, [&](World& world) { return train_placed(world, way, seed); }))
      CHECK(distance(one, rank) < kRounding);
  // In 16 bits, whose sums tests/promises bounds, the same bits on every rank each time.
  const ScaledWay narrow{.precision = {.param = bf16, .reduce = bf16}};
  const auto first = on_ranks(3, [&](World& world) { return train_placed(world, narrow, seed); });
  const auto second = on_ranks(3, [&](World& world) { return train_placed(world, narrow, seed); });
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(same_bits(first[0], second[rank]));
}

// A product's sums take their terms in one order, however its operands lie.
TEST_CASE("a Llama's bits do not depend on the dimension that is sharded",
          "[threads][fsdp2-023][fsdp2-040]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto trained = [&](World& world, const std::function<Shard(const Parameter&)>& placement,
                           bool ties) {
    nn::LlamaConfig config = small_llama(2, nn::Recompute::none, ties);
    config.vocab_size = 12;  // that ranks divide, as all its widths
    nn::Llama model(config);
    const ShardOptions options{.mesh = DeviceMesh::flat(world), .shard_placement_fn = placement};
    for (auto& block : model.blocks) fully_shard(block, options);
    fully_shard(model, options);
    nn::init(model, {seed}, world.device());
    optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});
    std::mt19937 random(static_cast<std::uint32_t>(seed) + static_cast<unsigned>(world.rank()));
    std::vector<std::int32_t> tokens(8);
    for (int step = 0; step < 2; ++step) {
      for (std::int32_t& t : tokens) t = static_cast<std::int32_t>(random() % 12);
      const Tensor inputs = Tensor::from(tokens, {2, 4}, world.device());
      model.loss(inputs, inputs).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return full_values(model);
  };
  // Tied tables by columns, too; others are streamed by rows, whose sums differ from those of one.
  for (const bool ties : {false, true})
    for (const int ranks : {1, 2, 4}) {
      INFO(ranks << " ranks");
      const auto rows = on_ranks(ranks, [&](World& world) { return trained(world, {}, ties); });
      const auto by_columns = [&](const Parameter& p) {
        return p.is_streamed() ? Shard{} : placed(ranks)(p);
      };
      const auto columns =
          on_ranks(ranks, [&](World& world) { return trained(world, by_columns, ties); });
      CHECK(same_bits(rows[0], columns[0]));
    }
}

TEST_CASE(
    "handles, state and files of shards of any dimension say where they lie, and go to others",
    "[threads][fsdp2-041]") {
  struct Found {
    std::string printed, refused;
    Shape local, strides, gradient;
    std::vector<float> mine, full, rows, back;
    bool is_loaded = false, is_in_file = false, has_moments = false;
  };
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "model.safetensors").string();
  const auto found = on_ranks(2, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::flat(world);
    PlacedNet net, other, by_rows;
    net.shard({.mesh = mesh, .shard_placement_fn = placed(2)});
    other.shard({.mesh = mesh, .shard_placement_fn = placed(2)});
    by_rows.shard({.mesh = mesh});
    nn::init(net, {5}, world.device());
    nn::init(other, {6}, world.device());
    nn::init(by_rows, {6}, world.device());
    Found f;
    optim::AdamW optimizer(net.parameters(), {.lr = 1e-3});
    mean_square(net(positive_rows(1, world.rank(), 1, 4, world.device()))).backward();
    f.gradient = net.up.weight.grad().shape();
    optimizer.step();

    const DistributedTensor weight = net.up.weight.distributed();
    f.printed = weight.to_string();
    if (!Contains(" of dimension 1 here: 48 bytes").match(net.to_string()))
      f.printed = "no dimension";
    f.local = net.up.weight.shard().shape();
    f.strides = net.up.weight.shard().strides();
    f.mine = net.up.weight.shard().to_vector<float>();
    f.full = weight.full().to_vector<float>();
    const DistributedTensor rows = weight.redistribute({Shard{}});
    f.rows = rows.local().to_vector<float>();
    f.back = rows.redistribute(weight.placements()).local().to_vector<float>();
    const DistributedTensor dealt = distribute(weight.full(), mesh, {Shard{1}});
    if (!same_bits(dealt.local().to_vector<float>(), f.mine)) f.printed = "not dealt alike";

    f.refused = thrown_by([&] { by_rows.load(net.state_dict({.form = StateForm::view})); });
    other.load(net.state_dict());
    by_rows.load(net.state_dict({.form = StateForm::full}));
    const Values values = full_values(net);
    f.is_loaded = same_bits(values, full_values(other)) && same_bits(values, full_values(by_rows));
    checkpoint::save_weights(path, by_rows, world);
    for (const Parameter& p : other.parameters())
      p.assign(Tensor::zeros(p.shard().shape(), f32, world.device()));
    other.load(path);
    f.is_in_file = same_bits(values, full_values(other));
    optim::AdamW of_rows(by_rows.parameters(), {.lr = 1e-3});
    of_rows.load(by_rows, optimizer.state_dict(net, {.form = StateForm::full}));
    f.has_moments =
        same_bits(optimizer.distributed_moments(net.up.weight)[0].full().to_vector<float>(),
                  of_rows.distributed_moments(by_rows.up.weight)[0].full().to_vector<float>());
    return f;
  });
  for (int rank = 0; rank < 2; ++rank) {
    const Found& f = found[static_cast<std::size_t>(rank)];
    CHECK(f.printed == concat("f32 [6, 4], Shard(1) over dp_shard 2; rows ", 2 * rank, " to ",
                              2 * rank + 1, " of dimension 1 here"));
    CHECK(f.local == Shape{6, 2});
    CHECK(f.strides == Shape{1, 6});  // as a gather and a reduction take them
    CHECK(f.gradient == Shape{6, 2});
    REQUIRE(f.full.size() == 24);
    REQUIRE(f.mine.size() == 12);
    for (std::size_t r = 0; r < 6; ++r)
      for (std::size_t c = 0; c < 2; ++c)
        CHECK(f.mine[r * 2 + c] == f.full[r * 4 + static_cast<std::size_t>(rank) * 2 + c]);
    CHECK(f.rows ==
          std::vector<float>(f.full.begin() + 12 * rank, f.full.begin() + 12 * rank + 12));
    CHECK(f.back == f.mine);
    CHECK(f.is_loaded);
    CHECK(f.is_in_file);
    CHECK(f.has_moments);
    CHECK_THAT(f.refused,
               Contains("'extra'") && Contains("along dimension 1, the model's along 0"));
  }
}

TEST_CASE(
    "other uses of a dimension that can't be sharded are refused; the plan names those that are") {
  const World world = World::emulated(1, 4, {.executor = ExecutorKind::virtual_});
  PlacedNet other;
  other.shard({.mesh = DeviceMesh::flat(world), .shard_placement_fn = placed(4)});
  CHECK_THAT(thrown_by([&] { other.up.weight.set_gather_transform(gather_in_e4m3()); }),
             Contains("along dimension 1"));
  CHECK_THAT(thrown_by([&] {
               DistributedTensor(Tensor::zeros({4, 2}, f32, world.device()), {4, 6},
                                 DeviceMesh::flat(world), {Shard{1}});
             }),
             Contains("Shard(1) of a tensor [4, 6] over 4 ranks"));
  CHECK_THAT(thrown_by([&] {
               DistributedTensor(Tensor::zeros({1}, f32, world.device()), {4},
                                 DeviceMesh::flat(world), {Shard{1}});
             }),
             Contains("give one of its dimensions"));
  other.materialize(world.device());
  for (const int dim : {-1, 2, 7}) {  // of a dict that a program has made
    const StateTensor odd(Tensor::zeros({6, 4}, f32, world.device()),
                          {.shape = {6, 4}, .dim = dim});
    const StateDict state{{"up.weight", odd}};
    CHECK_THAT(thrown_by([&] { other.load(state, {.strict = false}); }),
               Contains(concat("along dimension ", dim, " of [6, 4]")));
  }
  const ShardPlan plan = shard_plan(other);
  CHECK(plan.units[0].along == std::vector<std::pair<int, std::int64_t>>{{1, 96}});
  CHECK_THAT(plan.to_string(), Contains("'up' shards 24 elements along dimension 1"));
}
