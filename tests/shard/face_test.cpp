// What fully_shard makes of a module, with values or without: handles, names and values stay,
// memory shrinks, and any number of ranks begins with the same bits.
#include <memory>

#include "tessera/memory/memory.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<std::int64_t> kWidths = {5, 7, 1, 3};  // 1 row: most ranks own nothing of it

// Three steps of AdamW; the optimizer is made before or after the model is sharded.
Values train_three_steps(World& world, bool optimizer_first) {
  Stack model(kWidths);
  const auto make = [&] {
    return std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 0.05});
  };
  std::unique_ptr<optim::AdamW> optimizer = optimizer_first ? make() : nullptr;
  model.shard({.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  if (!optimizer) optimizer = make();
  nn::init(model, {11});
  for (int step = 0; step < 3; ++step) {
    mean_square(model(rows_of(5, 8 * step + 2 * world.rank(), 2, 5, world.device()))).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return full_values(model);
}

}  // namespace

TEST_CASE("a model that has its values shrinks unit by unit while it is sharded", "[threads]") {
  constexpr std::int64_t kUnit = 20 << 20, kUnits = 4, kTables = 1 << 16;  // bytes
  const auto held = on_ranks(2, [](World& world) {
    struct Wide final : nn::Module {
      Wide() {
        const nn::LinearOptions no_bias{.bias = false};
        for (int i = 0; i < kUnits; ++i) layers.emplace_back(2048, kUnit / 2048 / 4, no_bias);
        register_module("layers", layers);
      }
      nn::ModuleList<nn::Linear> layers;
    } model;
    model.materialize(world.device());
    Ledger& ledger = Memory::of(world.device()).ledger();
    std::vector<std::pair<std::int64_t, std::int64_t>> out;  // live, peak after each
    for (nn::Linear& layer : model.layers) {
      ledger.reset_peak();
      fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
      out.emplace_back(ledger.live_bytes(), ledger.peak_bytes());
    }
    return out;
  });
  for (const auto& rank : held)
    for (std::int64_t i = 0; i < kUnits; ++i) {
      const auto [live, peak] = rank[static_cast<std::size_t>(i)];
      const std::int64_t before = i * kUnit / 2 + (kUnits - i) * kUnit;
      CHECK(live <= before - kUnit / 2 + kTables);
      CHECK(peak <= before + kUnit / 2 + kTables);
    }
}

TEST_CASE("handles, names and shapes stay when a module is sharded", "[fsdp2-009]") {
  const World world = World::emulated(1, 3);
  nn::Llama model(small_llama(2));
  const auto before = model.named_parameters();
  const std::vector<Parameter> handles = model.parameters();
  shard_parts(model, {.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  shard_plan(model);
  const auto after = model.named_parameters();
  REQUIRE(after.size() == before.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    INFO(before[i].first);
    CHECK(after[i].first == before[i].first);
    CHECK(after[i].second == handles[i]);
    const Shape whole = handles[i].shape();
    CHECK(whole == before[i].second.shape());
    CHECK(handles[i].shard().shape() == ShardSpec{whole, 3, 1}.local_shape());
  }
}

TEST_CASE("an optimizer made before sharding is the one made after", "[threads]") {
  for (const int ranks : {1, 3}) {
    const auto first = on_ranks(ranks, [](World& world) { return train_three_steps(world, true); });
    const auto after =
        on_ranks(ranks, [](World& world) { return train_three_steps(world, false); });
    for (int rank = 0; rank < ranks; ++rank)
      CHECK(
          same_bits(first[static_cast<std::size_t>(rank)], after[static_cast<std::size_t>(rank)]));
  }
}

TEST_CASE("a module that has values keeps them when it is sharded, and computes with them",
          "[threads][fsdp2-052][fsdp2-073]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 4}) {
    struct Pair {
      Values before, after;
      bool trains = false;
      std::vector<float> loss_before, loss_after;
    };
    const auto results = on_ranks(ranks, [&](World& world) {
      Stack model(kWidths);
      nn::init(model, {seed}, world.device());
      Pair pair;
      for (const auto& [name, p] : model.named_parameters())
        pair.before[name] = p.shard().to_vector<float>();
      const Tensor x = rows_of(1, 0, 2, 5, world.device());
      pair.loss_before = mean_square(model(x)).to_vector<float>();
      model.shard({.mesh = DeviceMesh::flat(world)});
      pair.after = full_values(model);
      const Tensor loss = mean_square(model(x));
      pair.loss_after = loss.to_vector<float>();
      loss.backward();
      pair.trains = model.layers[0].weight.grad().defined();
      return pair;
    });
    for (const Pair& pair : results) {
      CHECK(pair.before.size() == 8);
      CHECK(same_bits(pair.before, pair.after));
      CHECK(same_bits(pair.loss_before, pair.loss_after));
      CHECK(pair.trains);
    }
  }
}

TEST_CASE("initial values are the same bits for any number of ranks, sharded or not",
          "[threads][fsdp2-015]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto values = [&](int ranks, bool sharded, bool llama) {
    const auto all = on_ranks(ranks, [&](World& world) {
      std::unique_ptr<nn::Module> model;
      const ShardOptions options{.mesh = DeviceMesh::flat(world)};
      if (llama) {
        auto made = std::make_unique<nn::Llama>(small_llama(2));
        if (sharded)
          for (nn::Module* part : made->parts()) fully_shard(*part, options);
        if (sharded) fully_shard(*made, options);
        model = std::move(made);
      } else {
        auto made = std::make_unique<Stack>(kWidths);
        if (sharded) made->shard(options);
        model = std::move(made);
      }
      model->materialize(world.device());
      nn::init(*model, {seed});
      return full_values(*model);
    });
    for (const Values& other : all) CHECK(same_bits(all[0], other));
    return all[0];
  };
  for (const bool llama : {false, true}) {
    const Values one = values(1, true, llama);
    CHECK(same_bits(one, values(1, false, llama)));
    for (const int ranks : {2, 3, 4, 5}) {
      INFO(ranks << " ranks");
      CHECK(same_bits(one, values(ranks, true, llama)));
    }
    double most = 0;
    for (const auto& [name, v] : one) most = std::max(most, largest(v));
    CHECK(most > 0);
  }
}

TEST_CASE("every initializer gives the same values on any number of ranks", "[shard]") {
  const std::vector<Initializer> all = {
      Initializer::uniform(-1, 1),
      Initializer::normal(0, 1),
      Initializer::kaiming_uniform(),
      Initializer::xavier_normal(),
      Initializer::constant(3),
      Initializer::truncated_normal(0, 1, -1, 2),
      Initializer::by_index([](std::int64_t i) { return 0.5 * static_cast<double>(i); })};
  for (std::size_t which = 0; which < all.size(); ++which) {
    INFO("initializer " << which);
    std::vector<Values> by_ranks;
    for (const int ranks : {1, 2, 4})
      by_ranks.push_back(on_ranks(ranks, [&](World& world) {
        Stack stack({3, 5, 2});
        for (nn::Linear& layer : stack.layers) layer.weight.set_initializer(all[which]);
        start(stack, world, 9);
        return full_values(stack);
      })[0]);
    CHECK(same_bits(by_ranks[0], by_ranks[1]));
    CHECK(same_bits(by_ranks[0], by_ranks[2]));
  }
}

TEST_CASE("a model that nobody has initialised is zero, on any number of ranks", "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    const auto sums = on_ranks(ranks, [](World& world) {
      nn::Linear layer(4, 6);
      fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
      layer.materialize(world.device());
      return sum(layer(Tensor::ones({3, 4}, f32, world.device()))).item();
    });
    CHECK(sums == std::vector<double>(static_cast<std::size_t>(ranks), 0));
  }
}

TEST_CASE("a model that has memory is sharded, and trains, where inner units take all of it",
          "[threads]") {
  for (const int ranks : {1, 2})
    for (const bool trains : on_ranks(ranks, [](World& world) {
           Mlp blocks({4, 4, 4});
           nn::init(blocks, {1}, world.device());
           shard_each({&blocks.layers[0], &blocks.layers[1], &blocks},
                      {.mesh = DeviceMesh::flat(world)});
           mean_square(blocks(rows_of(1, 0, 2, 4, world.device()))).backward();
           return blocks.layers[0].weight.grad().defined();
         }))
      CHECK(trains);
}

namespace {

// Two steps over a mesh of one dimension, on rows that its ranks share.
Values train_over(const DeviceMesh& mesh) {
  Stack model({5, 7, 1, 3});
  model.shard({.mesh = mesh});
  nn::init(model, {11}, mesh.world().device());
  optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
  for (int step = 0; step < 2; ++step) {
    mean_square(model(rows_of(5, 8 * step + 2 * mesh.shard_rank(), 2, 5, mesh.world().device())))
        .backward();
    optim::clip_grad_norm(model.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  return full_values(model);
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
