// What a program decides about its units, where ranks decide otherwise or at the wrong time: every
// rank hears what was decided, of which unit, before a wrong value is made.
#include "tessera/optim/muon.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

using DecidedOf = std::function<void(Stack&)>;

// What each of two ranks hears where rank 1 alone decides, or all do and none hears anything.
std::vector<std::string> heard_of(const DecidedOf& decide, bool on_all, bool trains = true) {
  return on_ranks(2, [&](World& world) {
    Stack model({5, 7, 3, 4});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {5});
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
              Contains("; what stands in parentheses comes of calls that all ranks make, or none"));
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
  CHECK_THAT(
      said[1],
      Contains(
          "in what was decided; here: (prefetches layers.1); every rank makes the same calls of "));
}

TEST_CASE("a model that one rank alone has made wrong is an error there, and told to its peers") {
  const std::pair<std::function<void(nn::Linear&, ShardOptions&)>, std::string> faults[] = {
      {[](nn::Linear&, ShardOptions& options) { options.offload = Offload::cpu; },
       "unit 'layers.1' has its shards on the host, its root on the device"},
      {[](nn::Linear& layer, ShardOptions& options) { options.ignored = {layer.weight}; },
       "parameter 'layers.1.weight' is ignored by a unit inside of"}};
  for (const auto& [fault, says] : faults) {
    std::vector<std::string> heard(3);
    const auto body = [&, &fault = fault](World& world) {
      try {
        Stack model({5, 7, 3});
        const ShardOptions options{.mesh = DeviceMesh::flat(world)};
        ShardOptions odd = options;
        if (world.rank() == 1) fault(model.layers[1], odd);
        fully_shard(model.layers[0], options);
        fully_shard(model.layers[1], odd);
        fully_shard(model, options);
        nn::init(model, {1}, world.device());
        model(rows_of(1, 0, 1, 5, world.device()));
      } catch (const std::exception& error) {
        heard[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    };
    CHECK_THROWS_AS(run_local(3, {.threads = 1}, body), std::exception);
    for (const std::string& said : heard) CHECK_THAT(said, Contains(says));
  }
}

TEST_CASE("a unit that one rank leaves out in forward is told to every rank, by its name",
          "[threads]") {
  const auto heard = on_ranks(2, [](World& world) {
    Stack model({5, 5, 5});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {5});
    std::string said;
    try {
      const Tensor x = rows_of(1, 0, 2, 5, world.device());
      const Tensor y = model.call([&] {
        const Tensor h = model.layers[0](x);
        return world.rank() == 0 ? model.layers[1](h) : h;
      });
      mean_square(y).backward();
      world.device().synchronize();
    } catch (const CommError& error) {
      said = error.what();
      reset(model);
    }
    return said;
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("all_gather layers.1") &&
                         Contains("in forward every rank calls the same units"));
}

// What each of two ranks hears where `f` is run with a model of several, and CommError ends it.
std::vector<std::string> heard_of_models(
    std::size_t count,
    const std::function<void(nn::ModuleList<Stack>&, World&, const Tensor&)>& f) {
  return on_ranks(2, [&](World& world) {
    nn::ModuleList<Stack> models;
    for (std::size_t i = 0; i < count; ++i)
      models.emplace_back(std::vector<std::int64_t>{5, 7, 5})
          .shard({.mesh = DeviceMesh::flat(world)});
    models.materialize(world.device());
    nn::init(models, {5});
    for (Stack& model : models) shard_plan(model);
    std::string heard;
    try {
      f(models, world, rows_of(1, 0, 2, 5, world.device()));
      world.device().synchronize();
    } catch (const CommError& error) {
      heard = error.what();
      reset(models);
    }
    return heard;
  });
}

TEST_CASE("a rank that calls another model, whose units have the same names, is told of it",
          "[threads]") {
  const auto heard = heard_of_models(2, [](auto& models, World& world, const Tensor& x) {
    const NoGradGuard none;
    models[world.rank() == 0 ? 0 : 1](x);
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("rank 0 submitted 'all_gather (root)' ") &&
                         Contains("rank 1 submitted 'all_gather of root 2: (root)' "));
  const auto alike = heard_of_models(2, [](auto& models, World&, const Tensor& x) {
    for (Stack& model : models) mean_square(model(x)).backward();
  });
  for (const std::string& said : alike) CHECK(said.empty());
}

TEST_CASE("of models alike a rank that first calls another one is told of it on every rank",
          "[threads]") {
  const auto heard = on_ranks(2, [](World& world) {
    const auto made = [&](std::uint64_t seed) {
      auto model = std::make_unique<Stack>(std::vector<std::int64_t>{5, 7, 5});
      model->shard({.mesh = DeviceMesh::flat(world)});
      nn::init(*model, {seed}, world.device());
      return model;
    };
    const Tensor x = rows_of(1, 0, 2, 5, world.device());
    made(3);  // is gone
    const auto first = made(5), second = made(6);
    std::unique_ptr<Stack> alone;  // another kind, which rank 1 never calls
    if (world.rank() == 1) {
      alone = std::make_unique<Stack>(std::vector<std::int64_t>{5, 5});
      alone->shard({.mesh = DeviceMesh::flat(world)});
    }
    std::vector<std::string> said;
    for (Stack* const called : {(world.rank() == 0 ? first : second).get(), second.get()}) {
      try {
        mean_square((*called)(x)).backward();
        said.emplace_back();
      } catch (const ContractError& error) {
        said.emplace_back(error.what());
      }
    }
    return said;
  });
  for (int rank : {0, 1}) {
    const auto& said = heard[static_cast<std::size_t>(rank)];
    CHECK_THAT(said[0], Contains(concat("is the root of model ", rank + 1, " of those alike")) &&
                            Contains("every rank makes models, and calls them first, in the same "
                                     "order"));
    CHECK(said[1].empty());
  }
}

TEST_CASE("a root of a model that is gone leaves its number to the next") {
  const auto last_of = on_ranks(2, [](World& world) {
    std::vector<std::string> last;
    for (int time = 0; time < 3; ++time) {
      Stack model({5, 7, 5});
      model.shard({.mesh = DeviceMesh::flat(world)});
      nn::init(model, {5}, world.device());
      model(rows_of(1, 0, 2, 5, world.device()));
      FlightEntry entry;
      const FlightRecorder& recorder = world.flight_recorder();
      if (recorder.find(recorder.last_submitted(), entry)) last.emplace_back(entry.name);
    }
    return last;
  });
  for (const auto& last : last_of)
    CHECK(last == std::vector<std::string>(3, "all_gather layers.1"));
}

TEST_CASE("a step of the optimizer that one rank leaves out, or makes twice, is told to every rank",
          "[threads]") {
  const int odd_steps = GENERATE(0, 2);
  const auto heard = heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
    optim::Sgd optimizer(models.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      mean_square(models[0](x)).backward();
      for (int i = 0; i < (step == 1 && world.rank() == 1 ? odd_steps : 1); ++i) optimizer.step();
      optimizer.zero_grad();
    }
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("all_gather (root)") && Contains("steps: 2)") &&
                         Contains(concat("steps: ", 1 + odd_steps, ')')) &&
                         Contains("; ranks differ in steps of the optimizer or the model"));
}

TEST_CASE("matrices that one rank gives Muon in another order are told to every rank") {
  for (const std::string& said : on_ranks(2, [](World& world) {
         Stack model({5, 5, 5});
         model.shard({.mesh = DeviceMesh::flat(world)});
         nn::init(model, {5}, world.device());
         const Parameter &first = model.layers[0].weight, &second = model.layers[1].weight;
         optim::Muon optimizer(
             world.rank() == 0 ? std::vector{first, second} : std::vector{second, first},
             {model.layers[0].bias, model.layers[1].bias});
         mean_square(model(rows_of(1, 0, 2, 5, world.device()))).backward();
         return thrown_by([&] { optimizer.step(); });
       }))
    CHECK_THAT(said, Contains("Muon: here 2 matrices") && Contains("'layers.0.weight'") &&
                         Contains("in another order; give every rank the same"));
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

TEST_CASE("nothing is decided in the middle of a call or a backward pass") {
  const auto found = on_ranks(2, [](World& world) {
    Stack model({5, 7, 3});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {5});
    std::vector<std::string> said;
    const auto decide = [&] {
      nn::Module& unit = model.layers[0];
      said.push_back(thrown_by([&] { set_reductions_in_flight(unit, 2); }));
      said.push_back(thrown_by([&] { set_reshard_after_forward(unit, Reshard::never); }));
      said.push_back(thrown_by([&] { set_reshard_after_backward(unit, false); }));
      said.push_back(thrown_by([&] { set_unshard_in_backward(unit, true); }));
      said.push_back(thrown_by([&] { set_requires_all_reduce(unit, false); }));
      said.push_back(thrown_by([&] { set_modules_to_forward_prefetch(unit, {}); }));
      said.push_back(thrown_by([&] { set_modules_to_backward_prefetch(unit, {}); }));
    };
    run_within_step(model, rows_of(1, world.rank(), 1, 5, world.device()), decide);
    return said;
  });
  for (const auto& said : found) {
    REQUIRE(said.size() == 14);
    for (const std::string& line : said)
      CHECK_THAT(line, Contains("of unit 'layers.0' is running; do it between steps"));
  }
}

TEST_CASE("what an inner unit ignores, the units around it ignore, too") {
  const auto said = on_ranks(2, [](World& world) {
    Stack model({5, 7, 3});
    const DeviceMesh mesh = DeviceMesh::flat(world);
    std::vector<std::string> lines;
    fully_shard(model.layers[0], {.mesh = mesh, .ignored = {model.layers[0].bias}});
    lines.push_back(thrown_by([&] { fully_shard(model, {.mesh = mesh}); }));
    fully_shard(model, {.mesh = mesh, .ignored = {model.layers[0].bias}});
    model.materialize(world.device());
    lines.push_back(concat(model.layers[0].bias.shard().numel()));
    Stack ragged({4, 4, 4});
    ragged.layers[0].weight.set_block_rows(2);
    lines.push_back(thrown_by(
        [&] { fully_shard(ragged, {.mesh = mesh, .ignored = {ragged.layers[0].weight}}); }));
    return lines;
  });
  for (const auto& lines : said) {
    CHECK_THAT(lines[0], Contains("parameter 'layers.0.bias' is ignored by a unit inside of the "
                                  "module of 'scale'; give this unit"));
    CHECK(lines[1] == "7");
    CHECK_THAT(lines[2],
               Contains("the module of 'scale' ignores parameter 'layers.0.weight', which has "
                        "blocks of rows"));
  }
}

TEST_CASE("options and decisions that no unit can take name its parameters") {
  const Device device = Device::cpu();
  Stack model({5, 7, 3});
  const World world = World::single();
  const DeviceMesh mesh = DeviceMesh::flat(world);
  CHECK_THAT(
      thrown_by([&] { fully_shard(model.layers[1], {.mesh = mesh, .reductions_in_flight = 0}); }),
      Contains("the module of 'weight': reductions_in_flight is 0; expected 1 to 64"));
  const int before = __LINE__;
  try {
    fully_shard({&model.layers[0], &model.layers[1]}, {.mesh = mesh, .reductions_in_flight = 0});
    FAIL_CHECK("refuses nothing");
  } catch (const ContractError& error) {  // a module has its whole name only under a root
    CHECK(error.is_at_caller());
    CHECK(error.where().line() == before + 2);
    CHECK_THAT(error.where().file_name(), Contains("disagreement_test.cpp"));
  }
  CHECK_THAT(thrown_by([&] { fully_shard(model, {.mesh = mesh, .piece_bytes = -1}); }),
             Contains("the module of 'scale': piece_bytes is -1; expected 1 or more"));
  CHECK_THAT(thrown_by([&] {
               fully_shard(model, {.mesh = mesh, .reshard_after_forward = Reshard::to(3)});
             }),
             Contains("the module of 'scale': Reshard::to(3) of 1 rank"));
  CHECK_THAT(thrown_by([&] { shard_plan(model.layers[0]); }),
             Contains("the module of 'layers.0.weight' is not a unit"));
  fully_shard(model, {.mesh = mesh});
  CHECK_THAT(thrown_by([&] { fully_shard(model, {.mesh = mesh}); }),
             Contains("the module of 'scale' is a unit already"));
  CHECK_THAT(thrown_by([&] { set_gradient_divide_factor(model, 0); }),
             Contains("the module of 'scale': factor is 0"));
}

TEST_CASE("ranks that shard along different dimensions hear so on each, with the parameter",
          "[threads]") {
  for (const std::string& heard : on_ranks(2, [](World& world) {
         Stack model({4, 4, 4});
         model.shard(
             {.mesh = DeviceMesh::flat(world), .shard_placement_fn = [&](const Parameter& p) {
                return Shard{p.shape().ndim() == 2 ? world.rank() : 0};
              }});
         nn::init(model, {1}, world.device());
         return thrown_by([&] { model(rows_of(1, 0, 2, 4, world.device())); });
       }))
    CHECK_THAT(heard, Contains("unit 'layers.0' differs between ranks in parameters") &&
                          Contains("layers.0.weight [4, 4]"));
}
