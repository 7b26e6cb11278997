// Ranks whose units, models or calls are not the same: all of them hear which unit or model it is.
#include <memory>

#include "tests/shard/differences.hpp"
#include "tests/shard/heard.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

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
    start(model, world, 5);
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
                         Contains("in forward every rank must call the same units"));
}

TEST_CASE("ranks that call different units of one size are told so by name", "[threads]") {
  std::vector<std::string> messages(2);
  CHECK_THROWS_AS(run_checked(2, {.threads = 1},
                              [&](World& world) {
                                Branches model;
                                start(model, world, 77);
                                try {
                                  model.call([&] {
                                    const Tensor h = model.stem(own_rows(world, 1));
                                    return world.rank() == 0 ? model.left(h) : model.right(h);
                                  });
                                  world.device().synchronize();
                                } catch (const CommError& error) {
                                  messages[static_cast<std::size_t>(world.rank())] = error.what();
                                  throw;
                                }
                              }),
                  CommError);
  for (const std::string& message : messages)
    CHECK_THAT(message, Contains("all_gather left") && Contains("all_gather right"));
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
    CHECK_THAT(said[0],
               Contains(concat("of several models alike this rank calls model ", rank + 1,
                               ", with root")) &&
                   Contains("every rank must make models, and first call them, in the same order"));
    CHECK(said[1].empty());
  }
}

TEST_CASE("a root of a model that is gone leaves its number to the next") {
  const auto last_of = on_ranks(2, [](World& world) {
    std::vector<std::string> last;
    for (int time = 0; time < 3; ++time) {
      Stack model({5, 7, 5});
      start(model, world, 5);
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

TEST_CASE(
    "ranks whose units differ are told what differs, all of them, before anything is submitted",
    "[threads]") {
  for (const HybridSizes sizes : {HybridSizes{.shard = 4}, HybridSizes{2, 2}})
    for (int odd = 0; odd < 4; ++odd)
      for (const Difference& difference : differences())
        for (const std::string& message : on_ranks(4, [&](World& world) {
               return heard_of(difference, world, DeviceMesh::hybrid(world, sizes), odd);
             }))
          CHECK_THAT(message, StartsWith("fully_shard: " + difference.says));
  const auto counts = on_ranks(3, [](World& world) {
    Stack model({5, 4, 3});
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    if (world.rank() != 1) fully_shard(model.layers[0], options);
    fully_shard(model, options);
    model.materialize(world.device());
    return thrown_by([&] { shard_plan(model); });
  });
  CHECK_THAT(counts[0], Contains("here the model has 2 units, on one rank 1, on another 2; "));
  CHECK_THAT(counts[1], Contains("here the model has 1 unit, on one rank 1, on another 2; "));
  const auto names = on_ranks(2, [](World& world) {
    Stack model({5, 4, 3});
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    fully_shard(model.layers[world.rank() == 0 ? 0 : 1], options);
    fully_shard(model, options);
    model.materialize(world.device());
    return thrown_by([&] { shard_plan(model); });
  });
  CHECK_THAT(names[0], Contains("of 2 is here 'layers.0', and another one on another rank"));
  CHECK_THAT(names[1], Contains("of 2 is here 'layers.1', and another one on another rank"));
}
