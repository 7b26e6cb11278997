// ShardOptions::ignored: what units leave alone is whole on every rank, and the program's own.
#include <string>
#include <tuple>

#include "tessera/distributed/collectives.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a layer whose parameters are ignored is averaged by hand beside units",
          "[threads][fsdp2-100]") {
  // As DDP inside FSDP: the inner layer is whole on every rank.
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks) {
    const auto all = on_ranks(ranks, [&](World& world) {
      Mlp model({5, 6, 6, 3});
      make_positive(model);
      nn::Linear& inner = model.layers[1];
      const ShardOptions options{.mesh = DeviceMesh::flat(world), .ignored = inner.parameters()};
      shard_each({&model.layers[0], &model}, options);
      nn::init(model, {seed}, world.device());
      bool is_whole = true;
      for (const Parameter& p : inner.parameters())
        is_whole = is_whole && !p.unit() && p.shard().shape() == p.shape();
      optim::SGD optimizer(model.parameters(), {.lr = 0.003, .momentum = 0.5});
      for (int step = 0; step < 3; ++step) {
        const std::int64_t rows = 12 / ranks;
        mean_square(model(positive_rows(seed, world.rank() * rows, rows, 5, world.device())))
            .backward();
        for (const Parameter& p : inner.parameters())
          raw::copy_into(p.grad(), raw::mul(dist::all_reduce(p.grad(), world), 1. / ranks));
        optim::clip_grad_norm(model.parameters(), 1.0);
        optimizer.step();
        optimizer.zero_grad();
      }
      return std::tuple(full_values(model), is_whole,
                        model.state_dict().at("layers.1.weight").values.shape());
    });
    const Values first = std::get<0>(all[0]);
    for (const auto& [values, is_whole, shape] : all) {
      CHECK(same_bits(values, first));
      CHECK(is_whole);
      CHECK(shape == Shape{6, 6});
    }
    return first;
  };
  const Values one = train(1);
  CHECK(one.size() == 6);
  for (const int ranks : {2, 3})
    CHECK(distance(one, train(ranks)) < 5 * kRounding);  // as in fsdp2_unit_test
}

TEST_CASE("reset discards gradients of what is ignored, too", "[threads]") {
  for (const auto& [dropped, again, told] : on_ranks(2, [](World& world) {
         Stack model({4, 5, 3});
         ShardOptions options{.mesh = DeviceMesh::flat(world),
                              .ignored = model.layers[0].parameters()};
         fully_shard(model, options);
         nn::init(model, {1}, world.device());
         const auto backward = [&] {
           mean_square(model(rows_of(1, world.rank(), 1, 4, world.device()))).backward();
           return model.layers[0].weight.grad().to_vector<float>();
         };
         const auto first = backward();
         std::string told;
         try {
           world.barrier();  // nobody resets before all have their gradients
         } catch (const CommError& error) {
           told = error.what();  // nor does a reset wait for a peer to leave the barrier
         }
         reset(model);
         const bool is_dropped = !model.layers[0].weight.grad().defined();
         return std::tuple(is_dropped, same_bits(backward(), first), told);
       })) {
    CHECK(dropped);
    CHECK(again);
    if (!told.empty()) CHECK_THAT(told, Contains("it gave the step up"));
  }
}

TEST_CASE("a parameter is ignored by all units around it, and on all ranks", "[threads]") {
  const std::vector<std::string> errors = [] {
    std::vector<std::string> found;
    const World world = World::single();
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    Stack sharded({4, 5, 3}), ignored({4, 5, 3});
    ShardOptions ignoring = options;
    ignoring.ignored = sharded.layers[0].parameters();
    fully_shard(sharded.layers[0], options);
    found.push_back(thrown_by([&] { fully_shard(sharded, ignoring); }));
    ignoring.ignored = ignored.layers[0].parameters();
    ignoring.offload = Offload::cpu;
    found.push_back(thrown_by([&] { fully_shard(ignored, ignoring); }));
    ignoring.offload = Offload::none;
    Stack whole({4, 3});
    nn::init(whole, {1}, world.device());
    found.push_back(thrown_by(
        [&] { fully_shard(whole, {.mesh = DeviceMesh::flat(world), .ignored = {whole.scale}}); }));
    fully_shard(ignored.layers[0], ignoring);  // a unit without parameters
    fully_shard(ignored, ignoring);
    nn::init(ignored, {1}, world.device());
    for (const ShardPlan::Unit& unit : shard_plan(ignored).units)
      found.push_back(concat(unit.name, ' ', unit.parameters));
    return found;
  }();
  CHECK_THAT(errors[0], Contains("the module of 'scale' ignores parameter 'layers.0.weight', which "
                                 "already belongs to unit '") &&
                            Contains("ignore it there, too"));
  CHECK_THAT(errors[1], Contains("'layers.0.weight' while others are offloaded; leave"));
  CHECK_THAT(errors[2], Contains("lies in memory with others; shard a model before"));
  CHECK_THAT(errors, Catch::Matchers::VectorContains(std::string("layers.0 0")));
  const auto differing = on_ranks(2, [](World& world) {
    Stack model({4, 5, 3});
    ShardOptions options{.mesh = DeviceMesh::flat(world)};
    if (world.rank() == 1) options.ignored = {model.layers[1].bias};
    fully_shard(model, options);
    nn::init(model, {1}, world.device());
    return thrown_by([&] { model(rows_of(1, 0, 2, 4, world.device())); });
  });
  for (const std::string& error : differing)
    CHECK_THAT(error, Contains("unit '(root)' differs between ranks in parameters"));
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

TEST_CASE("an ignored parameter that was frozen before a step that failed: the next one is right",
          "[threads]") {
  struct Net final : nn::Module {
    Net() {
      register_parameter("a", a);
      register_parameter("b", b);
      register_parameter("c", c);
      register_parameter("w", w);
    }
    Tensor operator()(bool uses_b) {
      return call([&] {
        const Tensor y = sum(w.value()) + sum(a.value());
        return uses_b ? y + sum(b.value()) : y;
      });
    }
    Parameter a{{3}, Initializer::constant(1)}, b{{3}, Initializer::constant(1)},
        c{{3}, Initializer::constant(1)}, w{{4}, Initializer::constant(1)};
  };
  for (const auto& found : on_ranks(2, [](World& world) {
         Net net;
         fully_shard(net, {.mesh = DeviceMesh::flat(world), .ignored = {net.a, net.b, net.c}});
         nn::init(net, {1}, world.device());
         net(true).backward();
         net.zero_grad();
         net.c.freeze();
         std::string cause;
         try {
           world.barrier();  // of which a rank may hear that its peer has gone on, and failed
           if (world.rank() == 0) throw std::runtime_error("stopped");
           net(true).backward();
           world.barrier();
         } catch (const std::exception& error) {
           cause = error.what();
         }
         reset(net, cause);
         net(false).backward();
         return std::pair(net.a.grad().to_vector<float>(), net.b.grad().to_vector<float>());
       })) {
    CHECK(found.first == std::vector<float>(3, 1.f));
    CHECK(found.second == std::vector<float>(3, 0.f));
  }
}
