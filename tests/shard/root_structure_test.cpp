// Units, parameters and roots that come after the first call: they work at the root's next call, or
// are refused by name, with a remedy that works.
#include <memory>

#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

constexpr int kLateRanks = 3, kRankRows = 2;  // of the data, and of a rank
constexpr std::int64_t kLateWidth = 4;

// A trunk of residual blocks, of which there may come more, and an adapter that may come to it.
struct Trunk final : nn::Module {
  Trunk() {
    register_modules("blocks", blocks);
    for (int i = 0; i < 2; ++i) append();
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = x;
      for (nn::Linear& block : blocks) h = h + tanh(block(h));
      return down.defined() ? h + linear(linear(h, down), up) : h;
    });
  }
  nn::Linear& append() {
    nn::Linear& block = blocks.emplace_back(kLateWidth, kLateWidth);
    block.weight.set_initializer(Initializer::normal(0, 0.4));
    return block;
  }
  void inject() {
    down = Parameter({3, kLateWidth}, Initializer::normal(0, 0.4));
    up = Parameter({kLateWidth, 3}, Initializer::normal(0, 0.4));
    register_parameter("down", down);
    register_parameter("up", up);
  }
  nn::ModuleList<nn::Linear> blocks;
  Parameter down, up;
};
struct Net final : nn::Module {
  Net() { register_modules("trunk", trunk, "head", head); }
  Tensor operator()(const Tensor& x) {
    return call([&] { return head(trunk(x)); });
  }
  Trunk trunk;
  nn::Linear head{kLateWidth, 3};
};

// A program of one rank, or of several: with units, and its part of the data.
struct Program {
  Program(World& world, Reshard way)
      : world(world), options{.mesh = DeviceMesh::flat(world), .reshard_after_forward = way} {}
  void shard(nn::Module& module) const {
    if (world.size() > 1) fully_shard(module, options);
  }
  Tensor loss(const std::function<Tensor(const Tensor&)>& f, std::uint64_t seed) const {
    const int rows = kRankRows * (world.size() > 1 ? 1 : kLateRanks);
    return mean_square(f(rows_of(seed, rows * world.rank(), rows, kLateWidth, world.device())));
  }
  World& world;
  ShardOptions options;
};

// What a program changes behind its second step, and in which units.
enum class Change { none, block, block_and_mask, block_alone, adapter, adapter_on_meta, root };

Values trained(World& world, Reshard way, Change change) {
  const Program program(world, way);
  Net model;
  for (nn::Linear& block : model.trunk.blocks) program.shard(block);
  program.shard(model.trunk);
  if (change != Change::root) {
    program.shard(model.head);
    program.shard(model);
  }
  nn::init(model, {3}, world.device());
  optim::AdamW optimizer(model.parameters(), {.lr = 0.02});
  const auto step = [&](std::uint64_t seed, bool whole) {
    program.loss([&](const Tensor& x) { return whole ? model(x) : model.trunk(x); }, seed)
        .backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (const std::uint64_t seed : {1, 2}) step(seed, change != Change::root);
  const auto evaluate = [&](nn::Linear& module) {
    const NoGradGuard no_gradient;
    module(rows_of(9, 0, 2, kLateWidth, world.device()));
  };
  Trunk& trunk = model.trunk;
  switch (change) {
    case Change::none:
      break;
    case Change::block:
    case Change::block_and_mask:
    case Change::block_alone: {
      if (change == Change::block_and_mask) model.freeze();
      nn::Linear& block = trunk.append();
      program.shard(block);
      nn::init(block, {4}, world.device());
      if (change == Change::block_alone) evaluate(block);
      optimizer.add_parameters(block.parameters());
      break;
    }
    case Change::adapter:  // with whole memory first
      trunk.inject();
      model.materialize(world.device());
      for (const Parameter& p : {trunk.down, trunk.up}) p.initialize({{7}});
      program.shard(trunk);
      optimizer.add_parameters({trunk.down, trunk.up});
      break;
    case Change::adapter_on_meta:
      trunk.inject();
      program.shard(trunk);
      model.materialize(world.device());
      for (const Parameter& p : {trunk.down, trunk.up}) p.initialize({{7}});
      optimizer.add_parameters({trunk.down, trunk.up});
      break;
    case Change::root:
      program.shard(model.head);
      program.shard(model);
      break;
  }
  for (const std::uint64_t seed : {3, 4, 5}) step(seed, true);
  return full_values(model);
}

}  // namespace

TEST_CASE("what comes below a root that has run trains as without units", "[threads]") {
  const Change change =
      GENERATE(Change::none, Change::block, Change::block_and_mask, Change::block_alone,
               Change::adapter, Change::adapter_on_meta, Change::root);
  CAPTURE(static_cast<int>(change));
  const Values alone =
      on_ranks(1, [&](World& world) { return trained(world, Reshard::always, change); })[0];
  for (const Reshard way : kReshards) {
    CAPTURE(way);
    for (const Values& values :
         on_ranks(kLateRanks, [&](World& world) { return trained(world, way, change); }))
      // Five steps of 0.02: as for masks, AdamW's may part by a thousandth of one each.
      for (const auto& [name, expected] : alone) {
        INFO(name);
        REQUIRE(values.at(name).size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i)
          CHECK(std::abs(values.at(name)[i] - expected[i]) <= 5 * 0.02f * 1e-3f);
      }
  }
}

TEST_CASE("a parameter that no unit has is refused by name, and its remedy works", "[threads]") {
  struct Seen {
    std::string first, later, without_memory, again, inner, inner_again;
    bool is_finite = false;
  };
  for (const Seen& seen : on_ranks(2, [](World& world) {
         const ShardOptions options{.mesh = DeviceMesh::flat(world)};
         const auto sharded = [&](Net& model) {
           for (nn::Linear& block : model.trunk.blocks) fully_shard(block, options);
           fully_shard(model, options);
         };
         const Tensor x = rows_of(1, 0, 2, kLateWidth, world.device());
         Seen s;
         Net early;
         sharded(early);
         early.trunk.inject();
         nn::init(early, {1}, world.device());
         s.first = thrown_by([&] { early(x); });
         Net model;
         sharded(model);
         nn::init(model, {1}, world.device());
         mean_square(model(x)).backward();
         model.trunk.inject();
         s.without_memory = thrown_by([&] { nn::init(model, {1}); });
         model.materialize(world.device());
         s.later = thrown_by([&] { model(x); });
         fully_shard(model, options);
         s.again = thrown_by([&] { fully_shard(model, options); });
         nn::init(model, {1});
         mean_square(model(x)).backward();
         Net nested;
         for (nn::Linear& block : nested.trunk.blocks) fully_shard(block, options);
         shard_each({&nested.trunk, &nested}, options);
         nn::init(nested, {1}, world.device());
         nested.trunk.inject();
         nested.trunk.materialize(world.device());
         s.inner = thrown_by([&] { nested(x); });
         fully_shard(nested.trunk, options);
         nn::init(nested, {1});
         s.inner_again = thrown_by([&] { nested(x); });
         s.is_finite = model.trunk.down.grad().defined() && model.trunk.down.mesh() != nullptr;
         return s;
       })) {
    for (const std::string& said : {seen.first, seen.later})
      CHECK_THAT(said, Contains("'trunk.down' was registered after fully_shard") &&
                           Contains("call fully_shard on the root again to take it in"));
    CHECK_THAT(seen.without_memory,
               Contains("'trunk.down' has no memory yet") && Contains("call materialize"));
    CHECK_THAT(seen.again, Contains("is a unit already"));
    CHECK_THAT(seen.inner, Contains("call fully_shard on 'trunk' again to take it in"));
    CHECK(seen.inner_again == "");
    CHECK(seen.is_finite);
  }
}

TEST_CASE("what changes below a root says what it waits for", "[threads]") {
  struct Seen {
    std::string forward, takes, mesh, prefetch, two_roots;
    bool trains = false;
  };
  for (const Seen& seen : on_ranks(2, [](World& world) {
         const ShardOptions options{.mesh = DeviceMesh::flat(world)};
         Net model;
         shard_each({&model.trunk, &model.head, &model}, options);
         nn::init(model, {1}, world.device());
         const Tensor x = rows_of(1, 0, 2, kLateWidth, world.device());
         Seen s;
         Tensor loss = mean_square(model(x));
         nn::Linear& block = model.trunk.append();
         s.takes = thrown_by([&] { fully_shard(model.trunk, options); });
         loss.backward();
         const DeviceMesh other = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 1});
         s.mesh = thrown_by([&] { fully_shard(model.trunk, {.mesh = other}); });
         fully_shard(model.trunk, options);
         nn::init(block, {2});
         set_modules_to_forward_prefetch(model.trunk, {&model.head});
         s.prefetch = thrown_by([&] { mean_square(model(x)).backward(); });

         struct Shared final : nn::Module {
           explicit Shared(nn::Module& of) { register_module("of", of); }
           Tensor operator()(const Tensor& x) {
             return call([&] { return x * 1.; });
           }
         } second(model.head);
         fully_shard(second, options);
         second.materialize(world.device());
         s.two_roots = thrown_by([&] { second(x); });

         loss = mean_square(model(x));
         fully_shard(model.trunk.append(), options);
         nn::init(model.trunk.blocks[3], {2}, world.device());
         s.forward = thrown_by([&] { model(x); });
         loss.backward();
         mean_square(model(x)).backward();
         s.trains = model.trunk.blocks[3].weight.grad().defined() && block.weight.grad().defined();
         return s;
       })) {
    CHECK_THAT(seen.takes, Contains("takes in parameters while a forward"));
    CHECK_THAT(seen.mesh, Contains("another mesh or offload"));
    CHECK(seen.prefetch.empty());
    CHECK_THAT(seen.two_roots, Contains("unit 'of' already lies under another root"));
    CHECK_THAT(seen.forward, Contains("have changed while a forward still waits for its backward"));
    CHECK(seen.trains);
  }
}

TEST_CASE("a rank that alone adds a unit is told, and so are its peers", "[threads]") {
  std::string said;
  try {
    on_ranks(2, [](World& world) {
      const ShardOptions options{.mesh = DeviceMesh::flat(world)};
      Net model;
      for (nn::Linear& block : model.trunk.blocks) fully_shard(block, options);
      fully_shard(model, options);
      nn::init(model, {1}, world.device());
      const Tensor x = rows_of(1, 0, 2, kLateWidth, world.device());
      mean_square(model(x)).backward();
      if (world.rank() == 0) {
        nn::Linear& block = model.trunk.append();
        fully_shard(block, options);
        nn::init(block, {2}, world.device());
      }
      mean_square(model(x)).backward();
      return 0;
    });
  } catch (const CommError& error) {
    said = error.what();
  }
  CHECK_THAT(said, Contains("compare units") && Contains("all_gather"));
}
