// Parameters of a unit that are gathered, and computed in, another dtype than the others
// (MixedPrecision::param_override_fn). What is computed has the bits of units apart, one for each
// dtype, on any mesh.
#include "tessera/nn/embedding.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct OverriddenRouter final : nn::Module {
  explicit OverriddenRouter(DType dtype) : computes_in(dtype) {
    register_parameter("weight", weight);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& in) {
          seen = weight.value().dtype();
          return softmax(cast(linear(cast(in, computes_in), weight), f32));
        },
        x);
  }
  Parameter weight{{16, 20}, Initializer::normal(0, 0.5)};
  const DType computes_in;
  DType seen = f64;  // of the full tensor, in the last call
};

struct OverriddenBlock final : nn::Module {
  explicit OverriddenBlock(DType of_router) : router(of_router) {
    register_modules("up", up, "router", router);
  }
  Tensor operator()(const Tensor& x) {
    return call([&](const Tensor& in) { return cast(up(in), f32) * router(in); }, x);
  }
  nn::Linear up{20, 16};
  OverriddenRouter router;
};

struct OverriddenNet final : nn::Module {
  explicit OverriddenNet(DType of_router) : block(of_router) {
    register_modules("table", table, "block", block);
    register_parameter("scale", scale);
  }
  Tensor operator()(const Tensor& ids) {
    return call([&] { return block(table(ids)) * cast(scale, f32); });
  }
  nn::Embedding table{11, 20};
  OverriddenBlock block;
  Parameter scale{{16}, Initializer::normal(1, 0.1)};
};

struct OverrideCase {
  DType param = bf16, own = f32;  // of the units, and of router and table
  Offload offload = Offload::none;
  int replicas = 1;
  Reshard reshard = Reshard::automatic;
  std::int64_t packed_bytes = 4096;
};

struct OverrideRun {
  std::vector<float> losses;
  Values parameters;
  DType seen = f64;
  ShardPlan plan;
};

OverrideRun train_overridden(World& world, const OverrideCase& of, bool is_apart) {
  OverriddenNet model(of.own);
  ShardOptions options{.mesh = mesh_of(world, of.replicas),
                       .precision = {.param = of.param, .cast_forward_inputs = false},
                       .reshard_after_forward = of.reshard,
                       .slice_bytes = 256,
                       .piece_bytes = 64,
                       .packed_bytes = of.packed_bytes,
                       .offload = of.offload};
  if (is_apart) {
    ShardOptions own = options;
    own.precision.param = of.own;
    fully_shard(model.table, own);
    fully_shard(model.block.router, own);
  } else {
    options.precision.param_override_fn = [&](const Parameter& p) -> std::optional<DType> {
      if (p == model.block.router.weight || p == model.table.weight) return of.own;
      return {};
    };
  }
  ShardOptions of_block = options;
  of_block.precision.cast_forward_inputs = true;
  fully_shard(model.block, of_block);
  fully_shard(model, options);
  nn::init(model, {3}, world.device());
  optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
  OverrideRun run;
  for (int k = 0; k < 3; ++k) {
    const std::vector<std::int32_t> ids{k, 2 * world.rank(), 10 - world.rank(), 5};
    const Tensor loss = mean_square(model(Tensor::from(ids, {4}, world.device())));
    loss.backward();
    run.losses.push_back(static_cast<float>(loss.item()));
    optimizer.step();
    optimizer.zero_grad();
  }
  run.seen = model.block.router.seen;
  run.plan = shard_plan(model);
  run.parameters = full_values(model);
  return run;
}

}  // namespace

TEST_CASE("parameters in a dtype of their own train as in a unit of their own", "[threads]") {
  for (const auto& [param, own] : {std::pair(bf16, f32), std::pair(f32, bf16)})
    for (const auto& [ranks, replicas] :
         {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(4, 2)})
      for (const Offload offload : {Offload::none, Offload::cpu}) {
        CAPTURE(param, own, ranks, replicas, offload == Offload::cpu);
        const OverrideCase of{.param = param, .own = own, .offload = offload, .replicas = replicas};
        const auto run = [&](bool is_apart) {
          return on_ranks(ranks,
                          [&](World& world) { return train_overridden(world, of, is_apart); });
        };
        const auto together = run(false), apart = run(true);
        for (std::size_t rank = 0; rank < together.size(); ++rank) {
          CHECK(same_bits(together[rank].losses, apart[rank].losses));
          CHECK(same_bits(together[rank].parameters, apart[rank].parameters));
          CHECK(together[rank].seen == own);
        }
      }
}

TEST_CASE("what is kept of a unit from forward to backward has both dtypes", "[threads]") {
  for (const bool is_partial : {false, true}) {
    const OverrideCase of{.reshard = is_partial ? Reshard::to(2) : Reshard::never};
    const auto together =
                   on_ranks(4, [&](World& world) { return train_overridden(world, of, false); }),
               always =
                   on_ranks(4, [&](World& world) { return train_overridden(world, {}, true); });
    CHECK(same_bits(together[0].losses, always[0].losses));
    CHECK(same_bits(together[0].parameters, always[0].parameters));
  }
}

TEST_CASE("the plan counts what is gathered in another dtype", "[threads]") {
  const auto run = on_ranks(
      2, [&](World& world) { return train_overridden(world, {.packed_bytes = 0}, false); })[0];
  const ShardPlan::Unit& block = run.plan.units[1];
  CHECK(block.name == "block");
  const std::vector<std::pair<DType, std::int64_t>> overridden{{f32, 16 * 20}};
  CHECK(block.overridden == overridden);
  // [16, 20] in f32, the same in bf16 to a multiple of 256 bytes, and 16 in bf16.
  CHECK(block.gather_bytes == 1280 + 768 + 256);
  CHECK_THAT(run.plan.to_string(),
             Contains("'block' gathers 320 elements as f32, by param_override_fn"));
}

TEST_CASE("an override that can't be is an error that names parameter and remedy", "[threads]") {
  const World world = World::single();
  const auto said = [&](MixedPrecision precision, DType own) {
    nn::Linear layer(4, 3);
    precision.param_override_fn = [own](const Parameter&) { return std::optional(own); };
    return thrown_by(
        [&] { fully_shard(layer, {.mesh = DeviceMesh::flat(world), .precision = precision}); });
  };
  CHECK_THAT(said({.param = bf16}, i32),
             Contains("precision.param_override_fn gives i32 for parameter 'weight'") &&
                 Contains("; give f32, bf16, f16 or nothing"));
  CHECK_THAT(said({.param = bf16, .reduce = bf16}, f32),
             Contains("whose gradient can't be reduced in bf16; leave precision.reduce at f32"));
  for (const std::string& other : on_ranks(2, [](World& of) {
         nn::Linear layer(4, 3);
         MixedPrecision precision{.param = bf16};
         if (of.rank() == 1)
           precision.param_override_fn = [](const Parameter&) { return std::optional(f32); };
         fully_shard(layer, {.mesh = DeviceMesh::flat(of), .precision = precision});
         layer.materialize(of.device());
         return thrown_by([&] { layer(Tensor::ones({2, 4}, bf16, of.device())); });
       }))
    CHECK_THAT(other, Contains("differs between ranks in parameters"));
}
