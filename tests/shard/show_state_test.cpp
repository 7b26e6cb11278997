// State of sharded models by name: this rank's rows out and in, whole tensors into any number of
// ranks, hooks that see full parameters, and the text.
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/state.hpp"
#include "tessera/optim/adamw.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A stack with a running mean of its inputs.
struct Averaged : nn::Module {
  Averaged() : stack({2, 5, 3}) {
    register_module("stack", stack);
    register_buffer("mean", mean);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& in) {
          if (is_training()) mean.assign(raw::reduce(raw::Reduction::mean, in.detach(), 0));
          return stack(in - mean.value());
        },
        x);
  }
  void shard(const World& world, Reshard reshard = Reshard::automatic) {
    stack.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
    fully_shard(*this, {.mesh = DeviceMesh::flat(world)});
    materialize(world.device());
  }
  Stack stack;
  nn::Buffer mean{{2}, Initializer::constant(0.25)};
};

Values shards_of(const StateDict& state) {
  Values values;
  for (const auto& [name, entry] : state) values[name] = entry.values.to_vector<float>();
  return values;
}

}  // namespace

TEST_CASE("a sharded state dict has this rank's rows, and loads them back", "[shard][fsdp2-106]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 4}) {
    struct Found {
      Values full, reloaded, shards;
      bool has_specs = true;
      std::uint64_t calls = 0;  // of state dicts of model and optimizer, in both forms
    };
    const auto found = on_ranks(ranks, [&](World& world) {
      Averaged model;
      model.shard(world);
      nn::init(model, {seed});
      optim::AdamW optimizer(model.parameters());
      optimizer.prepare();
      Found f;
      f.full = full_values(model);
      const std::uint64_t before = world.flight_recorder().last_submitted();
      const StateDict state = model.state_dict();
      model.state_dict({.form = StateForm::view});
      optimizer.state_dict(model);
      f.calls = world.flight_recorder().last_submitted() - before;
      f.shards = shards_of(state);
      for (const auto& [name, p] : model.named_parameters()) {
        const ShardSpec &spec = state.at(name).spec, &own = p.spec();
        f.has_specs = f.has_specs && spec.shape == p.shape() && spec.world == own.world &&
                      spec.rank == own.rank && spec.owned() == own.owned();
      }
      nn::init(model, {seed + 1});
      model(rows_of(seed, 0, 3, 2, world.device()));  // fills slots with what is replaced
      model.load(state);
      f.reloaded = full_values(model);
      return f;
    });
    INFO(ranks << " ranks");
    for (const Found& f : found) {
      CHECK(f.has_specs);
      CHECK(f.calls == 0);
      CHECK(same_bits(f.reloaded, found[0].full));
      CHECK(f.shards.at("mean") == std::vector<float>(2, 0.25f));
    }
    std::vector<float> rows;
    for (const Found& f : found) {
      const auto& own = f.shards.at("stack.layers.0.weight");
      rows.insert(rows.end(), own.begin(), own.end());
    }
    CHECK(same_bits(rows, found[0].full.at("stack.layers.0.weight")));
  }
}

TEST_CASE("whole tensors are loaded on any number of ranks, and the next call uses them",
          "[shard]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Values saved;
  std::vector<float> outputs;
  for (const int ranks : {1, 2, 4}) {
    const auto found = on_ranks(ranks, [&](World& world) {
      Averaged model;
      model.shard(world, Reshard::never);
      nn::init(model, {ranks == 1 ? seed : seed + 1});
      const Tensor x = rows_of(seed, 0, 3, 2, world.device());
      if (ranks > 1) {
        model(x);
        StateDict whole;
        for (const auto& [name, p] : model.named_parameters())
          whole[name] = Tensor::from(saved.at(name), p.shape(), Device::cpu());
        whole["mean"] = Tensor::full({2}, 0.5, f32, Device::cpu());
        model.load(whole);
        world.barrier();
      }
      const Values values = full_values(model);
      model.eval();
      model.mean.assign(Tensor::full({2}, 0.5, f32, world.device()));
      return std::pair(values, model(x).detach().to_vector<float>());
    });
    INFO(ranks << " ranks");
    if (ranks == 1) {
      saved = found[0].first;
      outputs = found[0].second;
    }
    for (const auto& [values, output] : found) {
      CHECK(same_bits(values, saved));
      CHECK(same_bits(output, outputs));
    }
  }
}

TEST_CASE("rows of another number of ranks are refused on every rank, unchanged", "[shard]") {
  const auto said = on_ranks(4, [](World& world) {
    Averaged model;
    model.shard(world);
    nn::init(model, {1});
    const Values before = full_values(model);
    StateDict state = model.state_dict();
    StateTensor& weight = state.at("stack.layers.1.weight");
    weight.spec = {weight.spec.shape, 2, world.rank() / 2};
    weight.values = Tensor::zeros(weight.spec.local_shape(), f32, world.device());
    const std::string error = thrown_by([&] { model.load(state); });
    const bool unchanged = same_bits(full_values(model), before);
    return unchanged ? error : "changed";
  });
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    INFO(said[rank]);
    CHECK(said[rank].find("'stack.layers.1.weight' in the state dict is the rows of rank " +
                          std::to_string(rank / 2) + " of 2, but this is rank " +
                          std::to_string(rank) + " of 4") != std::string::npos);
  }
}

TEST_CASE("fully_shard leaves buffers whole, each rank with its own", "[shard]") {
  const auto means = on_ranks(3, [](World& world) {
    Averaged model;
    model.shard(world);
    nn::init(model, {1});
    model(Tensor::full({4, 2}, world.rank(), f32, world.device()));
    return model.mean.value().to_vector<float>();
  });
  for (std::size_t rank = 0; rank < means.size(); ++rank)
    CHECK(means[rank] == std::vector<float>(2, static_cast<float>(rank)));
}

TEST_CASE("hooks of users see full parameters, whenever they were registered", "[shard]") {
  for (const int ranks : {1, 2, 4}) {
    const auto seen = on_ranks(ranks, [](World& world) {
      Stack stack({2, 5, 3});
      std::vector<float> sums;
      const auto sum = [&](nn::Module& module, const auto&...) {
        auto& layer = dynamic_cast<nn::Linear&>(module);
        sums.push_back(
            static_cast<float>(raw::reduce_all(raw::Reduction::sum, layer.weight).item()));
      };
      stack.layers[0].register_forward_pre_hook(sum);
      stack.shard({.mesh = DeviceMesh::flat(world)});
      stack.layers[0].register_forward_hook(sum);
      nn::init(stack, {5}, world.device());
      const Tensor y = stack(Tensor::ones({3, 2}, f32, world.device()));
      mean_square(y).backward();
      return sums;
    });
    for (const auto& sums : seen) CHECK(sums == std::vector<float>(2, seen[0].at(0)));
    CHECK(seen[0].at(0) != 0);
  }
}

TEST_CASE("a sharded module prints what a rank has of it", "[shard]") {
  const auto texts = on_ranks(2, [](World& world) {
    Averaged model;
    model.shard(world);
    return model.to_string();
  });
  CHECK(texts[1].starts_with(
      "Averaged, Unit: 6 parameters, 37 elements, 148 bytes, of them 52 here\n"
      "├─ mean             f32 [2]     8 bytes, buffer\n"
      "└─ stack            Stack, Unit\n"
      "   ├─ scale         f32 [3]     12 bytes, row 2 here: 4 bytes\n"
      "   ├─ offset        f32 []      4 bytes, no row here\n"
      "   └─ layers        ModuleList<Linear>\n"
      "      ├─ 0          Linear, Unit\n"
      "      │  ├─ weight  f32 [5, 2]  40 bytes, rows 3 to 4 here: 16 bytes\n"));
  CHECK(texts[0].find("f32 [5, 2]  40 bytes, rows 0 to 2 here: 24 bytes\n") != std::string::npos);
}
