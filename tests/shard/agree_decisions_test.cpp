// What a program decides about its units, where ranks decide otherwise: every rank hears what was
// decided, of which unit, before a wrong value is made.
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/heard.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

using DecidedOf = std::function<void(Stack&)>;

// What each of two ranks hears where rank 1 alone decides, or all do and none hears anything.
std::vector<std::string> heard_of(const DecidedOf& decide, bool on_all, bool trains = true) {
  return on_ranks(2, [&](World& world) {
    Stack model({5, 7, 3, 4});
    start(model, world, 5);
    shard_plan(model);
    if (on_all || world.rank() == 1) decide(model);
    std::string heard;
    try {
      for (int step = 0; step < 2; ++step) {
        const Tensor loss = mean_square(model(rows_of(1, world.rank(), 1, 5, world.device())));
        if (trains) loss.backward();
      }
      world.device().synchronize();
    } catch (const CommError& error) {
      heard = error.what();
      reset(model);
    }
    return heard;
  });
}

}  // namespace

TEST_CASE("a decision of one rank alone is told to every rank, by the unit and what was decided",
          "[threads]") {
  const std::pair<DecidedOf, std::string> decisions[] = {
      {[](Stack& m) { set_reshard_after_forward(m.layers[1], Reshard::never); },
       "all_gather layers.1 (reshard never)"},
      {[](Stack& m) { set_reshard_after_backward(m.layers[0], false); },
       "all_gather layers.0 (open after backward)"},
      {[](Stack& m) { set_unshard_in_backward(m.layers[2], false); },
       "all_gather layers.2 (not read in backward)"},
      {[](Stack& m) {
         set_reshard_after_forward(m.layers[1], Reshard::always);
         set_modules_to_forward_prefetch(m.layers[1], {&m.layers[2], &m.layers[0]});
       },
       "all_gather layers.1 (reshard always, prefetches layers.2 layers.0)"},
      {[](Stack& m) { set_modules_to_backward_prefetch(m.layers[2], {&m.layers[0]}); },
       "all_gather layers.2 (prefetches in backward layers.0)"},
      {[](Stack& m) { set_gradient_divide_factor(m.layers[1], 5); },
       "all_gather layers.1 (gradients divided by 5)"},
      {[](Stack& m) { set_requires_gradient_sync(m.layers[0], false); },
       "all_gather layers.0 (set_requires_gradient_sync(false))"},
      {[](Stack& m) { set_requires_all_reduce(m.layers[2], false); },
       "all_gather layers.2 (set_requires_all_reduce(false))"},
  };
  for (const auto& [decide, text] : decisions) {
    INFO(text);
    const bool trains = text.find("not read") == text.npos;  // a linear layer's weight is
    for (const std::string& heard : heard_of(decide, false, trains))
      CHECK_THAT(
          heard,
          Contains(text) &&
              Contains(
                  "; the part in parentheses comes from calls that all ranks must make, or none"));
    for (const std::string& heard : heard_of(decide, true, trains)) CHECK(heard.empty());
  }
}

TEST_CASE("a unit that one rank alone opens or closes by hand is told to every rank, by its name",
          "[threads]") {
  const std::pair<DecidedOf, std::string> decisions[] = {
      // Rank 1 gathers it at once, its peer when it is called, behind others.
      {[](Stack& m) { unshard(m.layers[1]); }, "rank 1 submitted 'all_gather layers.1' "},
      // The root is open behind the plan on the peer alone, which gathers nothing for it.
      {[](Stack& m) { unshard(m), reshard(m); }, "rank 1 submitted 'all_gather (root)' "},
  };
  for (const auto& [decide, text] : decisions) {
    INFO(text);
    for (const std::string& heard : heard_of(decide, false))
      CHECK_THAT(heard, Contains(text) && Contains("every rank must submit the same collectives"));
    for (const std::string& heard : heard_of(decide, true)) CHECK(heard.empty());
  }
}

TEST_CASE("a decision of one rank before the root's first call is told by the unit, too") {
  const auto said = on_ranks(2, [](World& world) {
    Stack model({5, 7, 3});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    if (world.rank() == 1) set_modules_to_forward_prefetch(model.layers[0], {&model.layers[1]});
    return thrown_by([&] { shard_plan(model); });
  });
  CHECK_THAT(said[0],
             Contains("unit 'layers.0' differs between ranks in what was decided; here: nothing;"));
  CHECK_THAT(said[1], Contains("in what was decided; here: (prefetches layers.1); every rank must "
                               "make the same calls of "));
}

TEST_CASE("what one rank alone freezes, or lets fly, is told to every rank", "[threads]") {
  const bool freezes = GENERATE(false, true);
  const auto change = [&](Stack& m) {
    if (freezes)
      m.layers[1].set_trainable(false);
    else
      set_reductions_in_flight(m.layers[1], 3);
  };
  const auto heard = heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
    mean_square(models[0](x)).backward();
    if (world.rank() == 1) change(models[0]);
    mean_square(models[0](x)).backward();
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("rank 1 submitted 'compare units: 'layers.1' has changed'"));
}

TEST_CASE("a decision that is taken back leaves the gathers' names as they were") {
  for (const std::string& heard : heard_of(
           [](Stack& m) {
             set_reshard_after_forward(m, Reshard::never);
             set_reshard_after_forward(m, Reshard::automatic);
             set_reshard_after_backward(m, false);
             set_reshard_after_backward(m, true);
             set_modules_to_forward_prefetch(m.layers[0], {&m.layers[1]});
             set_modules_to_forward_prefetch(m.layers[0], {});
           },
           false))
    CHECK(heard.empty());
}
