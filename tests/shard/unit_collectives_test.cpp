// How many collectives a step issues, in every way to call units: counted at the communicators, not
// guessed.
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::uint64_t kGathers = 2, kOnce = 1;
constexpr std::uint64_t kTurn = 1;  // saved: what is called last stays for backward

struct Counted {
  std::uint64_t gathers = 0, reductions = 0;
  bool operator==(const Counted&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Counted& c) {
  return out << c.gathers << " gathers and " << c.reductions << " reductions";
}

// The collectives of `step(model, world)`, the same on every rank, by the engine's own count and by
// the communicators'.
template <class Model, class Make, class F>
Counted count(int ranks, const Make& make, Reshard reshard, const F& step) {
  struct Both {
    Counted engine, wire;
  };
  const auto results = on_ranks(ranks, [&](World& world) {
    const std::unique_ptr<Model> model = make();
    model->shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
    model->materialize(world.device());
    nn::init(*model, {3});
    step(*model, world);  // whatever only the first step does
    for (const auto& part : parts_of(model->parameters())) part.group->gradient = {};
    const ShardCounters before = shard_counters(*model);
    const std::uint64_t gathers = world.gather().submitted(),
                        reductions = world.reduce().submitted(),
                        all = world.flight_recorder().last_submitted();
    step(*model, world);
    const ShardCounters after = shard_counters(*model);
    CHECK(world.flight_recorder().last_submitted() - all ==
          after.gathers - before.gathers + after.reductions - before.reductions);
    return Both{{after.gathers - before.gathers, after.reductions - before.reductions},
                {world.gather().submitted() - gathers, world.reduce().submitted() - reductions}};
  });
  for (const Both& both : results) {
    CHECK(both.engine == both.wire);
    CHECK(both.wire == results[0].wire);
  }
  return results[0].wire;
}

std::unique_ptr<Stack> make_stack() {
  return std::make_unique<Stack>(std::vector<std::int64_t>{5, 7, 6, 3});
}
void one_step(Stack& model, World& world) {
  mean_square(model(rows_of(1, world.rank() * 4, 4, 5, world.device()))).backward();
}

}  // namespace

TEST_CASE("a step gathers each unit twice with resharding, once without, and reduces it once",
          "[threads][fsdp2-069]") {
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    const auto counted = [&](Reshard reshard) {
      return count<Stack>(ranks, make_stack, reshard, one_step);
    };
    CHECK(counted(Reshard::automatic) == Counted{3 * kGathers + kOnce - kTurn, 4});
    CHECK(counted(Reshard::always) == Counted{4 * kGathers, 4});
    CHECK(counted(Reshard::never) == Counted{4 * kOnce, 4});
  }
}

TEST_CASE("one rank has no collective at all", "[fsdp2-052]") {
  for (const Reshard reshard : kReshards)
    CHECK(count<Stack>(1, make_stack, reshard, one_step) == Counted{0, 0});
}

TEST_CASE("the plan says how many collectives a step will issue", "[threads]") {
  for (const Reshard reshard : kReshards) {
    const Counted counted = count<Stack>(2, make_stack, reshard, one_step);
    const auto plans = on_ranks(2, [&](World& world) {
      const auto model = make_stack();
      model->shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
      model->materialize(world.device());
      return shard_plan(*model);
    });
    Counted planned;
    for (const ShardPlan::Unit& unit : plans[0].units) {
      planned.gathers += static_cast<std::uint64_t>(unit.gathers_per_call);
      planned.reductions += static_cast<std::uint64_t>(unit.reductions_per_call);
    }
    CHECK(planned == counted);
  }
}

TEST_CASE("recomputation costs no further gather", "[threads]") {
  const auto make = [] {
    auto model = make_stack();
    model->recomputes = true;
    return model;
  };
  const auto step = [](Stack& model, World& world) {
    mean_square(model(rows_of(1, world.rank() * 4, 4, 5, world.device()).require_grad()))
        .backward();
  };
  CHECK(count<Stack>(2, make, Reshard::automatic, step) ==
        Counted{3 * kGathers + kOnce - kTurn, 4});
  CHECK(count<Stack>(2, make, Reshard::always, step) == Counted{4 * kGathers, 4});
  CHECK(count<Stack>(2, make, Reshard::never, step) == Counted{4 * kOnce, 4});
}

TEST_CASE("a unit inside a unit costs what any unit costs", "[threads]") {
  const auto make = [] { return std::make_unique<NestedBlocks>(3); };
  const auto step = [](NestedBlocks& model, World& world) {
    mean_square(model(rows_of(1, world.rank() * 4, 4, 4, world.device()))).backward();
  };
  CHECK(count<NestedBlocks>(2, make, Reshard::automatic, step) == Counted{6 * kGathers - kTurn, 6});
  CHECK(count<NestedBlocks>(2, make, Reshard::always, step) == Counted{6 * kGathers, 6});
  CHECK(count<NestedBlocks>(2, make, Reshard::never, step) == Counted{6 * kOnce, 6});
}

TEST_CASE("every call of a unit has its own reduction, and its own gathers where it does not stay",
          "[threads]") {
  class Twice final : public Stack {
   public:
    Twice() : Stack({4, 4}) {}
    Tensor operator()(const Tensor& x) {
      return call([&] { return layers[0](tanh(layers[0](x))) * scale.value(); });
    }
  };
  const auto make = [] { return std::make_unique<Twice>(); };
  const auto step = [](Twice& model, World& world) {
    mean_square(model(rows_of(1, world.rank() * 4, 4, 4, world.device()))).backward();
  };
  CHECK(count<Twice>(2, make, Reshard::always, step) == Counted{3 * kGathers, 3});
  // It stays from the first call to the second, too: the plan of the first step, which knows one
  // call of it, has a slot for the second already.
  CHECK(count<Twice>(2, make, Reshard::automatic, step) ==
        Counted{2 * kGathers + kOnce - 2 * kTurn, 3});
  // Open from the first call to the end of the second call's backward.
  CHECK(count<Twice>(2, make, Reshard::never, step).reductions == 3);
}

namespace {

void table_step(Tabled& model, World& world) {
  mean_square(model(Tensor::from(std::vector<std::int64_t>{0, 5, 2}, {3}, world.device())))
      .backward();
}

}  // namespace

TEST_CASE("backward does not gather a table that it does not read", "[threads]") {
  const auto make = [] { return std::make_unique<Tabled>(); };
  CHECK(count<Tabled>(2, make, Reshard::automatic, table_step) ==
        Counted{kOnce + kGathers - kTurn, 2});
  CHECK(count<Tabled>(2, make, Reshard::always, table_step) == Counted{kOnce + kGathers, 2});
  CHECK(count<Tabled>(2, make, Reshard::never, table_step) == Counted{2 * kOnce, 2});
  // Its rows are read again.
  const auto recomputed = [] { return std::make_unique<Tabled>(true); };
  CHECK(count<Tabled>(2, recomputed, Reshard::always, table_step) == Counted{2 * kGathers, 2});
}

TEST_CASE("a module that says that backward does not read its parameters, and is wrong, is told") {
  class Wrong final : public nn::Linear {
   public:
    using nn::Linear::Linear;
    bool reads_parameters_in_backward() const override { return false; }
  };
  for (const std::string& message : on_ranks(2, [](World& world) {
         Wrong model(4, 4);
         fully_shard(model,
                     {.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::always});
         nn::init(model, {1}, world.device());
         Tensor x = rows_of(1, 0, 4, 4, world.device());
         x.require_grad();
         return thrown_by([&] { mean_square(model(x)).backward(); });
       }))
    CHECK_THAT(message, Catch::Matchers::Contains("reads_parameters_in_backward"));
}

TEST_CASE(
    "evaluation gathers once, or until an update, and reduces nothing; each micro-batch counts",
    "[threads]") {
  const auto evaluate = [](Stack& model, World& world) {
    const NoGradGuard no_grad;
    model(rows_of(1, world.rank() * 4, 4, 5, world.device()));
  };
  for (const Reshard reshard : {Reshard::automatic, Reshard::always})
    CHECK(count<Stack>(2, make_stack, reshard, evaluate) == Counted{4 * kOnce, 0});
  CHECK(count<Stack>(2, make_stack, Reshard::never, evaluate) == Counted{0, 0});
  const auto accumulate = [](Stack& model, World& world) {
    for (int micro = 0; micro < 3; ++micro) one_step(model, world);
  };
  CHECK(count<Stack>(2, make_stack, Reshard::automatic, accumulate) ==
        Counted{3 * (3 * kGathers + kOnce - kTurn), 3 * 4});
}

TEST_CASE("frozen units are gathered and never reduced", "[threads]") {
  const auto make = [] {
    auto model = make_stack();
    model->layers[1].weight.freeze();
    model->layers[1].bias.freeze();
    return model;
  };
  CHECK(count<Stack>(2, make, Reshard::automatic, one_step) ==
        Counted{3 * kGathers + kOnce - kTurn, 3});
}
