// shard_plan with a step: the program's own, run before the first in a world without peers or
// bodies. A model that follows it takes every slot where it was planned, and computes as one that
// does not.
#include "tessera/autograd/random.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using CallOrder = std::vector<int>;  // of calls; empty: an evaluation, which calls each once

void run_step(Layers& model, const Tensor& x, const CallOrder& order) {
  if (!order.empty()) return mean_square(model(x, order)).backward();
  const NoGradGuard no_gradient;
  model(x, {0, 1, 2, 3, 4});
}

struct PlannedWay {
  bool is_hybrid = false;
  Reshard reshard = Reshard::automatic;
  int prefetch_depth = 1;
};

ShardOptions planned_options(const PlannedWay& way, World& world) {
  return {.mesh = way.is_hybrid ? DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2})
                                : DeviceMesh::flat(world),
          .reshard_after_forward = way.reshard,
          .prefetch_depth = way.prefetch_depth};
}

// Sharded and with memory; with values where there is a seed.
std::unique_ptr<Layers> made(World& world, const PlannedWay& way,
                             std::optional<std::uint64_t> seed = {}) {
  auto model = std::make_unique<Layers>();
  model->shard(planned_options(way, world));
  model->materialize(world.device());
  if (seed) nn::init(*model, {*seed});
  return model;
}

// The same steps in the world of a plan, in some rounds: plans of steps that alternate come to rest
// in these.
auto step_of(const PlannedWay& way, const std::vector<CallOrder>& steps) {
  return [=](World& world) {
    const std::shared_ptr<Layers> model = made(world, way);
    for (int round = 0; round < 4; ++round)
      for (const CallOrder& order : steps)
        run_step(*model, Tensor::empty({4, 6}, f32, world.device()), order);
    return model;
  };
}

struct PlannedRun {
  Values gradients;
  std::vector<std::int64_t> bytes;  // of the arena: before the first step, and after each
  std::vector<std::uint64_t> unplanned;
  ShardPlan plan;
};

std::vector<PlannedRun> train_planned(int ranks, const PlannedWay& way, std::uint64_t seed,
                                      const std::vector<CallOrder>& steps, bool is_planned) {
  return on_ranks(ranks, [&](World& world) {
    const std::unique_ptr<Layers> made_model = made(world, way, seed);
    Layers& model = *made_model;
    PlannedRun seen;
    seen.plan = is_planned ? shard_plan(model, step_of(way, steps)) : shard_plan(model);
    seen.bytes.push_back(seen.plan.arena_bytes);
    for (int k = 0; k < 3; ++k)
      for (const CallOrder& order : steps) {
        run_step(model, positive_rows(seed, world.rank() * 4, 4, 6, world.device()), order);
        seen.bytes.push_back(shard_plan(model).arena_bytes);
        seen.unplanned.push_back(shard_counters(model).unplanned_slots);
      }
    seen.gradients = shard_gradients(model);
    return seen;
  });
}

const CallOrder kTwice{3, 1, 1, 0, 2, 0}, kBackwards{4, 3, 2, 1, 0, 4, 3}, kOnceEach{0, 1, 2, 3, 4};

}  // namespace

TEST_CASE("a model that follows its planned steps lies as planned from the first on", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const auto& steps :
       {std::vector<CallOrder>{kTwice}, {kOnceEach}, {kBackwards, {}}, {{}, kTwice, kOnceEach}})
    for (const PlannedWay& way :
         {PlannedWay{}, PlannedWay{.reshard = Reshard::always, .prefetch_depth = 3},
          PlannedWay{.reshard = Reshard::never}, PlannedWay{.is_hybrid = true}}) {
      const int ranks = way.is_hybrid ? 4 : 3;
      const std::vector<PlannedRun> free = train_planned(ranks, way, seed, steps, false),
                                    follows = train_planned(ranks, way, seed, steps, true);
      for (std::size_t rank = 0; rank < follows.size(); ++rank) {
        const PlannedRun& seen = follows[rank];
        INFO(steps.size() << " steps, the first of " << steps[0].size() << " calls, reshard "
                          << way.reshard << ", rank " << rank);
        CHECK_FALSE(seen.plan.is_assumed == (steps != std::vector<CallOrder>{kOnceEach}));
        CHECK(seen.unplanned.back() == 0);
        CHECK(seen.bytes.front() == seen.bytes.back());
        CHECK(seen.bytes.back() <= free[rank].bytes.back());
        CHECK(same_bits(seen.gradients, free[rank].gradients));
        if (steps[0] == kTwice) CHECK(free[rank].unplanned.back() > 0);
      }
    }
}

TEST_CASE("one rank plans a step, too, though nothing of it takes a slot") {
  const auto plans = on_ranks(1, [](World& world) {
    const std::unique_ptr<Layers> made_model = made(world, {}, 3);
    Layers& model = *made_model;
    const ShardPlan plan = shard_plan(model, step_of({}, {kTwice}));
    run_step(model, positive_rows(1, 0, 4, 6, world.device()), kTwice);
    return plan;
  });
  CHECK(plans[0].arena_bytes == 0);
}

TEST_CASE("trainings and an evaluation after any number of them come to rest") {
  for (const bool is_planned : {false, true})
    for (const std::size_t trainings : {1, 3, 5}) {
      std::vector<CallOrder> steps(trainings, kTwice);
      steps.push_back({});
      for (const PlannedRun& seen : train_planned(2, {}, 5, steps, is_planned)) {
        INFO(trainings << " trainings, planned: " << is_planned);
        CHECK(seen.unplanned.back() == seen.unplanned[2 * steps.size() - 1]);
        if (is_planned) CHECK(seen.unplanned.back() == 0);
      }
    }
}

TEST_CASE("a planned step may decide, as the program's own does") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto decided = [](Layers& model) {
    set_reshard_after_forward(model, Reshard::never);
    set_reductions_in_flight(model, 2);
    set_modules_to_forward_prefetch(model.layers[0], {&model.layers[2]});
  };
  const auto unplanned = on_ranks(2, [&](World& world) {
    const std::unique_ptr<Layers> made_model = made(world, {}, seed);
    Layers& model = *made_model;
    shard_plan(model, [&](World& counted) {
      const std::shared_ptr<Layers> other = made(counted, {});
      decided(*other);
      run_step(*other, Tensor::empty({4, 6}, f32, counted.device()), kTwice);
      return other;
    });
    decided(model);
    run_step(model, positive_rows(seed, 4 * world.rank(), 4, 6, world.device()), kTwice);
    return shard_counters(model).unplanned_slots;
  });
  for (const std::uint64_t slots : unplanned) CHECK(slots == 0);
}

TEST_CASE("a planned step leaves the program's random draws and other models alone") {
  const auto seen = on_ranks(2, [](World& world) {
    const std::unique_ptr<Layers> made_model = made(world, {}, 3);
    Layers& model = *made_model;
    const auto values = [&] {
      std::vector<float> all;
      for (const Parameter& p : model.parameters()) {
        const std::vector<float> shard = p.shard().to_vector<float>();
        all.insert(all.end(), shard.begin(), shard.end());
      }
      return all;
    };
    const std::vector<float> before = values();
    const autograd::RandomState state = autograd::random_state();
    shard_plan(model, [](World& planned_world) {
      ++autograd::random_state().draws;
      return step_of({}, {kTwice})(planned_world);
    });
    const autograd::RandomState after = autograd::random_state();
    return std::pair(same_bits(before, values()), after.draws == state.draws);
  });
  for (const auto& [values, draws] : seen) {
    CHECK(values);
    CHECK(draws);
  }
}

TEST_CASE("a step that deviates from the planned ones is counted, and planned from then on") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto counts = on_ranks(2, [&](World& world) {
    const std::unique_ptr<Layers> made_model = made(world, {}, seed);
    Layers& model = *made_model;
    shard_plan(model, step_of({}, {kTwice}));
    std::vector<std::uint64_t> unplanned;
    for (const CallOrder& order :
         {kTwice, kBackwards, kTwice, kBackwards, kTwice, kBackwards, kTwice, kBackwards}) {
      run_step(model, positive_rows(seed, 4 * world.rank(), 4, 6, world.device()), order);
      unplanned.push_back(shard_counters(model).unplanned_slots);
    }
    return unplanned;
  });
  for (const std::vector<std::uint64_t>& unplanned : counts) {
    CHECK(unplanned[0] == 0);
    CHECK(unplanned[1] > 0);
    CHECK(unplanned[5] == unplanned.back());
  }
}

TEST_CASE("what is no plan of the model is refused by one line on every rank") {
  const auto refuses = [](const std::string& text, const auto& step) {
    INFO(text);
    const std::vector<std::string> lines = on_ranks(2, [&](World& world) {
      const std::unique_ptr<Layers> made_model = made(world, {}, 1);
      Layers& model = *made_model;
      std::string line = "nothing";
      try {
        step(model, world);
      } catch (const ContractError& error) {
        line = error.what();
      }
      if (line.find("has run") == std::string::npos)
        run_step(model, positive_rows(1, 0, 4, 6, world.device()), kTwice);
      return line;
    });
    CHECK(lines[0].find(text) != std::string::npos);
    CHECK(lines[0] == lines[1]);
  };
  refuses("the step has not called the model that it returned",
          [](Layers& model, World&) { shard_plan(model, step_of({}, {})); });
  refuses("the step returned no model", [](Layers& model, World&) {
    shard_plan(model, [](World&) { return std::shared_ptr<nn::Module>(); });
  });
  refuses("prefetch_depth of unit '(root)': 1; in the planned step: 2", [](Layers& model, World&) {
    shard_plan(model, step_of({.prefetch_depth = 2}, {kTwice}));
  });
  refuses("the model has 6 units, the one of the planned step 5", [](Layers& model, World&) {
    shard_plan(model, [](World& world) {
      auto other = std::make_shared<Layers>(4);
      other->shard(planned_options({}, world));
      other->materialize(world.device());
      run_step(*other, Tensor::empty({4, 6}, f32, world.device()), {0});
      return other;
    });
  });
  refuses(
      "the model is on 2 ranks, in 1 replica, the one of the planned step on 1 rank, in 2 replicas",
      [](Layers& model, World&) {
        shard_plan(model, [](World& world) {
          auto other = std::make_shared<Layers>();
          other->shard({.mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 1})});
          other->materialize(world.device());
          run_step(*other, Tensor::empty({4, 6}, f32, world.device()), {0});
          return other;
        });
      });
  refuses("is no unit of the world that the step was given", [](Layers& model, World& world) {
    shard_plan(model, [&](World&) { return step_of({}, {kTwice})(world); });
  });
  refuses("the ranks have planned different steps", [](Layers& model, World& world) {
    shard_plan(model, step_of({}, {world.rank() == 0 ? kTwice : kBackwards}));
  });
  refuses("unit '(root)' has run", [](Layers& model, World& world) {
    run_step(model, positive_rows(1, 0, 4, 6, world.device()), kTwice);
    shard_plan(model, step_of({}, {kTwice}));
  });
  refuses("unit 'layers.0' is no root", [](Layers& model, World&) {
    shard_plan(model);
    shard_plan(model.layers[0], step_of({}, {kTwice}));
  });
}
