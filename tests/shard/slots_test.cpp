// Where slots lie in steps that the plan was made for, or not, and the memory that these add.
// Values are compared with one rank's, whose units take no slots.
#include <iostream>

#include "tests/shard/support.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<int> kInOrder{0, 1, 2, 3, 4}, kOther{3, 1, 1, 0, 2, 0},
    kLong{4, 3, 2, 1, 0, 4, 3};

struct Way {
  Reshard reshard;
  int prefetch_depth, reductions_in_flight;
};

struct Seen {
  Values gradients;
  std::vector<std::uint64_t> unplanned;  // after each step
  std::vector<std::int64_t> bytes;       // of the arena
  ShardPlan plan;
};

// Runs each of `steps` on a model; gradients are those of all steps together.
template <class F>
std::vector<Seen> train(int ranks, const Way& way, std::uint64_t seed,
                        const std::vector<F>& steps) {
  return on_ranks(ranks, [&](World& world) {
    Layers model;
    model.shard({.mesh = DeviceMesh::flat(world),
                 .reshard_after_forward = way.reshard,
                 .prefetch_depth = way.prefetch_depth,
                 .reductions_in_flight = way.reductions_in_flight});
    nn::init(model, {seed}, world.device());
    Seen seen;
    for (const F& step : steps) {
      step(model, positive_rows(seed, world.rank() * (12 / ranks), 12 / ranks, 6, world.device()));
      seen.unplanned.push_back(shard_counters(model).unplanned_slots);
      seen.bytes.push_back(shard_plan(model).arena_bytes);
    }
    seen.gradients = shard_gradients(model);
    seen.plan = shard_plan(model);
    return seen;
  });
}

using Step = std::function<void(Layers&, const Tensor&)>;
Step training(const std::vector<int>& order) {
  return [order](Layers& model, const Tensor& x) { mean_square(model(x, order)).backward(); };
}

void evaluate(Layers& model, const Tensor& x) {
  const NoGradGuard no_gradient;
  model(x, kInOrder);
}

// Two graphs at a time.
void two_forwards(Layers& model, const Tensor& x) {
  const Tensor a = mean_square(model(x, kInOrder)), b = mean_square(model(x, kOther));
  b.backward();
  a.backward();
}

// Each layer but the last calls the last one, which is registered beside it, inside of its own
// call, as blocks do that share an adapter.
void with_adapter(Layers& model, const Tensor& x) {
  const Tensor y = model.call([&] {
    Tensor h = x;
    nn::Linear& adapter = model.layers[4];
    for (std::size_t i = 0; i < 4; ++i) {
      nn::Linear& layer = model.layers[i];
      h = layer.call([&] { return tanh(linear(adapter(h), layer.weight, layer.bias)); });
    }
    return h * model.scale.value();
  });
  mean_square(y).backward();
}

// Steps on 2 and 3 ranks: with one rank's gradients, each rank with the same plan.
std::vector<Seen> check_values(const Way& way, const std::vector<Step>& steps) {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Values one = assemble({train(1, way, seed, steps)[0].gradients});
  std::vector<Seen> all;
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks, reshard " << way.reshard);
    const std::vector<Seen> seen = train(ranks, way, seed, steps);
    std::vector<Values> shards;
    for (const Seen& of_rank : seen) {
      shards.push_back(of_rank.gradients);
      CHECK(of_rank.unplanned == seen[0].unplanned);
      CHECK(of_rank.bytes == seen[0].bytes);
    }
    CHECK(distance(one, assemble(shards)) < kRounding);
    all.push_back(seen[0]);
  }
  return all;
}

std::vector<Way> all_ways() {
  std::vector<Way> all;
  for (const Reshard reshard : kReshards)
    for (const int depth : {1, 3}) all.push_back({reshard, depth, depth == 1 ? 2 : 1});
  return all;
}

}  // namespace

TEST_CASE("a step that calls each unit once takes the slots that were planned before it") {
  for (const Way& way : all_ways())
    for (const Seen& seen : check_values(
             way, {training(kInOrder), evaluate, training(kInOrder), training(kInOrder)})) {
      CHECK(seen.unplanned.back() == 0);
      CHECK(seen.plan.is_assumed);
      CHECK(seen.bytes.front() == seen.bytes.back());
    }
}

TEST_CASE("what is assumed of a first step serves those that come after others, too") {
  for (const Way& way : all_ways())
    for (const Seen& seen :
         check_values(way, {training(kInOrder), training(kInOrder), evaluate, evaluate, evaluate,
                            training(kInOrder), evaluate, training(kInOrder)})) {
      CHECK(seen.unplanned.back() == 0);
      CHECK(seen.bytes == std::vector<std::int64_t>(8, seen.bytes[0]));
    }
}

TEST_CASE("a step in another order is planned from its own uses") {
  for (const Way& way : all_ways())
    for (const Seen& seen :
         check_values(way, {training(kOther), training(kOther), training(kOther)})) {
      CHECK(seen.unplanned[0] > 0);
      CHECK(seen.unplanned[1] == seen.unplanned[0]);
      CHECK(seen.unplanned[2] == seen.unplanned[0]);
      CHECK_FALSE(seen.plan.is_assumed);
      CHECK(seen.plan.arena_bytes >= seen.plan.most_alive_bytes);
      CHECK(seen.bytes[1] == seen.bytes[2]);
    }
}

TEST_CASE("steps that alternate come to rest", "[fsdp2-068]") {
  for (const Way& way : all_ways()) {
    std::vector<Step> steps;
    for (int round = 0; round < 6; ++round)
      for (const Step& step : {training(kOther), Step(evaluate), training(kLong),
                               training(kInOrder), Step(two_forwards)})
        steps.push_back(step);
    for (const Seen& seen : check_values(way, steps)) {
      CHECK(seen.unplanned[19] == seen.unplanned.back());
      CHECK(seen.bytes[19] == seen.bytes.back());
    }
  }
}

TEST_CASE("rounds of any steps of one forward come to rest") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  GridShare share;
  for (int trial = 0; trial < 100; ++trial) {
    if (!share.takes()) continue;
    // Of three steps, so that the same ones come before others; one may be an evaluation.
    std::vector<std::vector<int>> kinds(3);
    for (std::vector<int>& order : kinds)
      for (auto calls = 1 + below(4); calls > 0; --calls)
        order.push_back(static_cast<int>(below(3)));
    std::vector<std::size_t> round(1 + below(7));
    for (std::size_t& kind : round) kind = below(3);
    const bool evaluates = below(2) == 0;
    World world = World::emulated(0, 2, {.executor = ExecutorKind::virtual_});
    Layers model(3);
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    std::vector<std::uint64_t> unplanned;
    for (int k = 0; k < 24; ++k) {
      for (const std::size_t kind : round) {
        const bool trains = !evaluates || kind > 0;
        const std::optional<NoGradGuard> no_gradient =
            trains ? std::nullopt : std::make_optional<NoGradGuard>();
        const Tensor loss =
            mean_square(model(Tensor::empty({2, 6}, f32, world.device()), kinds[kind]));
        if (trains) loss.backward();
      }
      unplanned.push_back(shard_counters(model).unplanned_slots);
    }
    INFO("trial " << trial << ", " << round.size() << " steps");
    CHECK(unplanned.back() == unplanned[7]);
  }
}

TEST_CASE("a unit that is called inside of units beside it finds a slot, and comes to rest") {
  for (const Way& way : all_ways())
    for (const Seen& seen : check_values(way, std::vector<Step>(4, with_adapter))) {
      CHECK(seen.unplanned[0] > 0);
      CHECK(seen.unplanned[3] == seen.unplanned[1]);
      CHECK(seen.bytes[3] == seen.bytes[2]);
    }
}

TEST_CASE("two forwards a step, whose second begins with what the first has left, come to rest") {
  for (const Way& way : all_ways()) {
    const std::vector<Step> steps(8, [](Layers& model, const Tensor& x) {
      const Tensor a = mean_square(model(x, kInOrder)), b = mean_square(model(x, kInOrder));
      b.backward();
      a.backward();
    });
    for (const Seen& seen : check_values(way, steps)) {
      CHECK(seen.unplanned[2] == seen.unplanned.back());
      CHECK(seen.bytes[2] == seen.bytes.back());
    }
  }
}

TEST_CASE("after a failure all ranks begin with the plan of none") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](bool fails) {
    return on_ranks(2, [&](World& world) {
      Layers model;
      start(model, world, seed);
      const Tensor x = positive_rows(seed, world.rank() * 6, 6, 6, world.device());
      bool was_new = true;
      std::string failure;
      if (fails) {
        training(kOther)(model, x);
        try {
          training(kLong)(model, x);
          // One rank is in a step, with a plan and uses, which the other never began.
          if (world.rank() == 0) throw std::runtime_error("one rank");
          training(kOther)(model, x);
        } catch (const std::exception& error) {
          failure = error.what();
        }
        was_new = shard_plan(model).is_assumed;
        reset(model);
      }
      training(kInOrder)(model, x);
      return std::tuple(shard_gradients(model), was_new, shard_plan(model).is_assumed,
                        shard_counters(model).unplanned_slots, failure);
    });
  };
  const auto whole = run(false), after = run(true);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(same_bits(std::get<0>(whole[rank]), std::get<0>(after[rank])));
    CHECK_FALSE(std::get<1>(after[rank]));
    CHECK(std::get<2>(after[rank]));
    CHECK(std::get<3>(after[rank]) == 0);
  }
  CHECK(std::get<4>(after[0]) == "one rank");
}

TEST_CASE("after a failure in a step that follows what was assumed all ranks plan the same") {
  const auto bytes = on_ranks(2, [](World& world) {
    Layers model;
    start(model, world, 1);
    const Tensor x = positive_rows(1, world.rank() * 6, 6, 6, world.device());
    training(kInOrder)(model, x);
    try {
      if (world.rank() == 1) throw std::runtime_error("one rank, before its step");
      training(kInOrder)(model, x);
      world.device().synchronize();
    } catch (const std::exception&) {
      reset(model);
    }
    for (int k = 0; k < 3; ++k) training({0, 0})(model, x);
    return shard_plan(model).arena_bytes;
  });
  CHECK(bytes[0] == bytes[1]);
}

TEST_CASE("a plan that is made again after a failure counts the collectives of one step") {
  const auto plans = on_ranks(2, [](World& world) {
    Layers model;
    start(model, world, 1);
    const std::string first = shard_plan(model).to_string();
    for (int k = 0; k < 2; ++k)
      training(kOther)(model, positive_rows(1, 6 * world.rank(), 6, 6, world.device()));
    const bool was_new = shard_plan(model).is_assumed;
    reset(model);
    return std::tuple(first, was_new, shard_plan(model).to_string());
  });
  for (const auto& [first, was_new, again] : plans) {
    CHECK_FALSE(was_new);  // so the reset has made the model's slots anew
    CHECK(again == first);
  }
}

TEST_CASE("units called for ever without their root are kept no longer than a plan can take") {
  const auto bytes = on_ranks(2, [](World& world) {
    Layers model(2);
    start(model, world, 1);
    const NoGradGuard no_gradient;
    const Tensor x = rows_of(1, 0, 2, 6, world.device());
    model(x, {0, 1});
    const std::int64_t before = shard_plan(model).arena_bytes;
    for (int k = 0; k < 10'000; ++k) model.layers[static_cast<std::size_t>(k % 2)](x);
    model(x, {1, 0});
    return std::pair(before, shard_plan(model).arena_bytes);
  });
  for (const auto& [before, after] : bytes) CHECK(after <= before);
}

TEST_CASE("models that are trained in turn have slots in common under a root around them",
          "[threads][fsdp2-051]") {
  struct Game : nn::Module {
    Game() { register_modules("maker", maker, "critic", critic); }
    Layers maker, critic;
  };
  struct Trained {
    Values gradients;
    std::int64_t arena_bytes = 0;
    std::vector<std::uint64_t> unplanned;  // after each step
  };
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](World& world, bool is_one_root) {
    Game game;
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    game.maker.shard(options);
    game.critic.shard(options);
    if (is_one_root) fully_shard(game, options);
    nn::init(game, {seed}, world.device());
    const auto run = [&](const std::function<Tensor()>& loss) {
      (is_one_root ? game.call(loss) : loss()).backward();
    };
    const Tensor x = positive_rows(seed, world.rank() * 6, 6, 6, world.device());
    Trained trained;
    for (int step = 0; step < 6; ++step) {
      run([&] { return mean_square(game.critic(x, kInOrder)); });
      run([&] { return mean_square(game.critic(game.maker(x, kInOrder), kInOrder)); });
      if (is_one_root) trained.unplanned.push_back(shard_counters(game).unplanned_slots);
    }
    trained.arena_bytes =
        is_one_root ? shard_plan(game).arena_bytes
                    : shard_plan(game.maker).arena_bytes + shard_plan(game.critic).arena_bytes;
    trained.gradients = shard_gradients(game);
    return trained;
  };
  const auto each = on_ranks(2, [&](World& world) { return train(world, false); });
  const auto common = on_ranks(2, [&](World& world) { return train(world, true); });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(same_bits(each[rank].gradients, common[rank].gradients));
    CHECK(common[rank].unplanned.back() == common[rank].unplanned[3]);  // both steps are known
    CHECK(common[rank].arena_bytes < each[rank].arena_bytes);
  }
  std::cout << "slots of two models: " << each[0].arena_bytes << " bytes under two roots, "
            << common[0].arena_bytes << " under one\n";
}
