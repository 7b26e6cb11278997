// Units of mixed storage dtypes: trained f32 parameters, as adapters, beside a frozen base in 16 or
// 8 bits. What is computed has the bits of a base in f32 with the same values, on any mesh; the
// base has no f32 copy, and is gathered and kept in files as it is stored.
#include <algorithm>

#include "tessera/checkpoint/model.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// y = W x + U D x: W is frozen, D and U are trained. Hu and others, "LoRA", 2021.
struct Adapted final : nn::Module {
  Adapted(std::int64_t in, std::int64_t out)
      : base({out, in}, Initializer::normal(0, 0.5)),
        down({2, in}, Initializer::normal(0, 0.5)),
        up({out, 2}, Initializer::normal(0, 0.5)) {
    register_parameter("base", base);
    register_parameter("down", down);
    register_parameter("up", up);
    base.freeze();
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& h) {
          full = base.value().dtype();
          return linear(h, cast(base, h.dtype())) + linear(linear(h, down), up);
        },
        x);
  }
  Parameter base, down, up;
  DType full = f64;  // of the base, as the last call had it
};

struct Adapters final : nn::Module {
  Adapters() : scale({3}, Initializer::normal(1, 0.1)) {
    register_modules("a", a, "b", b);
    register_parameter("scale", scale);
  }
  Tensor operator()(const Tensor& x) {
    return call([&](const Tensor& h) { return b(tanh(a(h))) * scale; }, x);
  }
  Adapted a{5, 7}, b{7, 3};
  Parameter scale;
};

struct AdapterRun {
  std::vector<float> losses;
  Values parameters;
  DType full = f64;
  std::int64_t weights = 0, shards = 0;  // live bytes, and what they should be
  ShardPlan plan;
};

struct AdapterCase {
  DType stored = f32;         // of the base
  bool has_f32_copy = false;  // the same values, in f32
  DType param = f32;
  Offload offload = Offload::none;
  int replicas = 1;
  Reshard reshard = Reshard::automatic;
};

void cut_adapters(Adapters& model, const World& world, const AdapterCase& of) {
  const ShardOptions options{.mesh = mesh_of(world, of.replicas),
                             .precision = {.param = of.param},
                             .reshard_after_forward = of.reshard,
                             .piece_bytes = 64,
                             .offload = of.offload};
  shard_each({&model.a, &model.b, &model}, options);
}

AdapterRun train_adapters(World& world, const AdapterCase& of) {
  Adapters model;
  for (Adapted* const layer : {&model.a, &model.b})
    if (!of.has_f32_copy) layer->base.set_dtype(of.stored);
  cut_adapters(model, world, of);
  nn::init(model, {3}, world.device());
  for (Adapted* const layer : {&model.a, &model.b})
    if (of.has_f32_copy)
      layer->base.assign(raw::cast(raw::cast(layer->base.shard(), of.stored), f32));
  optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
  AdapterRun run;
  for (int k = 0; k < 4; ++k) {
    const Tensor x = rows_of(static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 5, world.device());
    const Tensor loss = mean_square(cast(model(x), f32));
    loss.backward();
    run.losses.push_back(static_cast<float>(loss.item()));
    optimizer.step();
    optimizer.zero_grad();
    if (k != 1) continue;
    for (const Adapted* const layer : {&model.a, &model.b})  // what is frozen may be written, too
      layer->base.edit(
          [](const Tensor& rows) { raw::copy_into(rows, raw::neg(raw::cast(rows, f32))); });
  }
  run.full = model.a.full;
  run.plan = shard_plan(model);
  for (const Parameter& p : model.parameters()) {
    const auto bytes = static_cast<std::int64_t>(size_bytes(p.dtype()));
    run.shards += (p.spec().chunk_numel() * bytes + 255) / 256 * 256;
  }
  const Device& device = world.device();
  run.weights = Memory::of(of.offload == Offload::cpu ? device.host() : device)
                    .ledger()
                    .live_bytes("weights");
  for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
    run.parameters[name] = raw::cast(full, f32).to_vector<float>();
  });
  return run;
}

}  // namespace

TEST_CASE("adapters over a frozen base in 16 or 8 bits train as over one in f32 with its values",
          "[threads][fsdp2-025]") {
  for (const DType stored : {bf16, f16, e4m3, e5m2})
    for (const DType param : {f32, bf16})
      for (const auto& [ranks, replicas] :
           {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(4, 1), std::pair(4, 2)})
        for (const Offload offload : {Offload::none, Offload::cpu}) {
          CAPTURE(stored, param, ranks, replicas, offload == Offload::cpu);
          const auto run = [&, ranks = ranks, replicas = replicas](bool has_f32_copy) {
            return on_ranks(ranks, [&](World& world) {
              return train_adapters(world, {stored, has_f32_copy, param, offload, replicas});
            });
          };
          const auto own = run(false);
          // bf16 keeps no more bits of what f16 has than of what is trained.
          if (stored != f16 || param == f32) {
            const auto wide = run(true);
            for (std::size_t rank = 0; rank < own.size(); ++rank) {
              CHECK(same_bits(own[rank].losses, wide[rank].losses));
              CHECK(same_bits(own[rank].parameters, wide[rank].parameters));
            }
          }
          for (const AdapterRun& each : own) {
            CHECK(each.full == stored);
            CHECK(each.weights == each.shards);
            const std::vector<std::pair<DType, std::int64_t>> of_a{{stored, 35}};
            CHECK(each.plan.units[1].stored == of_a);
            CHECK(each.plan.units[0].stored.empty());
          }
        }
}

TEST_CASE("what k ranks keep of several dtypes from forward to backward is what was gathered",
          "[threads]") {
  for (const DType stored : {bf16, e4m3})
    for (const DType param : {f32, bf16}) {
      CAPTURE(stored, param);
      const auto run = [&](Reshard reshard) {
        return on_ranks(4, [&](World& world) {
          return train_adapters(world, {.stored = stored, .param = param, .reshard = reshard});
        });
      };
      const auto always = run(Reshard::always), two = run(Reshard::to(2));
      for (std::size_t rank = 0; rank < always.size(); ++rank) {
        CHECK(same_bits(always[rank].losses, two[rank].losses));
        CHECK(same_bits(always[rank].parameters, two[rank].parameters));
        CHECK(two[rank].plan.units[1].post_forward_ranks == 2);
      }
    }
}

TEST_CASE("a frozen base in 8 bits trains on several ranks as on one", "[threads][fsdp2-025]") {
  // Each rank has its own rows; one rank has all of them where it is given each as a micro-batch.
  const auto train_all = [](World& world, int shares) {
    Adapters model;
    model.a.base.set_dtype(e4m3);
    model.b.base.set_dtype(e5m2);
    cut_adapters(model, world, {});
    nn::init(model, {3}, world.device());
    optim::SGD optimizer(model.parameters(), {.lr = 0.1});
    for (int k = 0; k < 3; ++k) {
      for (int share = 0; share < shares / world.size(); ++share) {
        const Tensor x = rows_of(static_cast<std::uint64_t>(k), 2 * (world.rank() + share), 2, 5,
                                 world.device());
        (mean_square(model(x)) * (static_cast<double>(world.size()) / shares)).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    return full_values(model);
  };
  const Values one = on_ranks(1, [&](World& world) { return train_all(world, 4); })[0];
  const Values four = on_ranks(4, [&](World& world) { return train_all(world, 4); })[0];
  // Sums of four gradients in another order: a few roundings of 2^-24 in each of three steps, which
  // products carry on; a wrong row of the base is off by 2^-4 and more.
  CHECK(distance(one, four) < 0x1p-16);
}

TEST_CASE("a base that is written alone is gathered anew, also where its unit is open",
          "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    const auto outputs = on_ranks(ranks, [&](World& world) {
      std::vector<std::vector<float>> seen;
      for (const bool is_open : {false, true}) {
        Adapters model;
        for (Adapted* const layer : {&model.a, &model.b}) layer->base.set_dtype(e4m3);
        cut_adapters(model, world, {.param = bf16});
        nn::init(model, {3}, world.device());
        const Tensor x = cast(rows_of(1, 0, 2, 5, world.device()), bf16);
        const NoGradGuard none;
        seen.push_back(raw::cast(model(x), f32).to_vector<float>());
        if (is_open) unshard(model.a);
        model.a.base.edit(
            [](const Tensor& rows) { raw::copy_into(rows, raw::neg(raw::cast(rows, f32))); });
        seen.push_back(raw::cast(model(x), f32).to_vector<float>());
      }
      return seen;
    });
    for (const auto& seen : outputs) {
      CHECK(seen[0] == seen[2]);
      CHECK(seen[1] == seen[3]);
      CHECK(seen[0] != seen[1]);
    }
  }
}

TEST_CASE("a language model frozen in bf16 but for its norms, tables in slices, is one in f32",
          "[threads]") {
  const auto train = [](World& world, bool has_f32_copy) {
    nn::Llama model(small_llama(2));
    for (const auto& [name, p] : model.named_parameters())
      if (p.shape().ndim() > 1) {
        p.freeze();
        if (!has_f32_copy) p.set_dtype(bf16);
      }
    const ShardOptions options{
        .mesh = DeviceMesh::flat(world), .precision = {.param = bf16}, .slice_bytes = 1};
    shard_parts(model, options);
    nn::init(model, {5}, world.device());
    if (has_f32_copy)
      for (const Parameter& p : model.parameters())
        if (!p.trainable()) p.assign(raw::cast(raw::cast(p.shard(), bf16), f32));
    optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
    for (int k = 0; k < 3; ++k) {
      std::vector<std::int32_t> ids;
      for (int i = 0; i < 5; ++i) ids.push_back((3 * i + 5 * k + world.rank()) % 11);
      const Tensor all = Tensor::from(ids, {1, 5}, world.device());
      model.loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return full_values(model);
  };
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto run = [&](bool has_f32_copy) {
      return on_ranks(ranks, [&](World& world) { return train(world, has_f32_copy); })[0];
    };
    CHECK(same_bits(run(false), run(true)));
  }
}

TEST_CASE("memory and slots of mixed storage dtypes are planned to the byte", "[threads]") {
  const auto phases = [](const World& world) {
    Adapters model;
    model.a.base.set_dtype(e4m3);
    model.b.base.set_dtype(bf16);
    cut_adapters(model, world, {});
    nn::init(model, {3}, world.device());
    optim::AdamW optimizer(model.parameters());
    Ledger& ledger = Memory::of(world.device()).ledger();
    std::vector<std::int64_t> seen;
    for (int k = 0; k < 3; ++k) {
      ledger.reset_peak();
      mean_square(model(Tensor::ones({2, 5}, f32, world.device()))).backward();
      optimizer.step();
      optimizer.zero_grad();
      world.device().block(world.device().compute().record());
      seen.insert(seen.end(), {ledger.peak_bytes(), ledger.live_bytes()});
    }
    const ShardPlan plan = shard_plan(model);
    seen.insert(seen.end(), {plan.arena_bytes, plan.units[1].gather_bytes});
    return seen;
  };
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto measured = on_ranks(ranks, [&](World& world) { return phases(world); });
    for (int rank = 0; rank < ranks; ++rank)
      CHECK(phases(World::emulated(rank, ranks, {.executor = ExecutorKind::virtual_})) ==
            measured[static_cast<std::size_t>(rank)]);
    // a: 7 x 5 of e4m3, 2 x 5 and 7 x 2 of f32, in entries of 256 bytes.
    if (ranks > 1) CHECK(measured[0].back() == 3 * 256);
  }
}

TEST_CASE("state dicts and files keep a base as it is stored, and load it on other ranks",
          "[threads]") {
  const TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  const auto make = [](Adapters& model, World& world, std::uint64_t seed, bool in_f32 = false) {
    if (!in_f32) {
      model.a.base.set_dtype(e4m3);
      model.b.base.set_dtype(bf16);
    }
    cut_adapters(model, world, {});
    nn::init(model, {seed}, world.device());
  };
  const auto values_of = [](const StateDict& state) {
    Values values;
    for (const auto& [name, entry] : state)
      values[name] = raw::cast(entry.values, f32).to_vector<float>();
    return values;
  };
  struct Kept {
    Values values;
    DType a = f64, b = f64, down = f64;
  };
  const Kept saved = on_ranks(2, [&](World& world) {
    Adapters model;
    make(model, world, 3);
    checkpoint::save_weights(path, model, world);
    const StateDict state = model.state_dict({.form = StateForm::full});
    return Kept{values_of(state), state.at("a.base").values.dtype(),
                state.at("b.base").values.dtype(), state.at("a.down").values.dtype()};
  })[0];
  CHECK(saved.a == e4m3);
  CHECK(saved.b == bf16);
  CHECK(saved.down == f32);
  const checkpoint::SafetensorsReader file(path);
  for (const checkpoint::SafetensorsEntry& entry : file.entries())
    CHECK(entry.dtype == (entry.name == "a.base" ? e4m3 : entry.name == "b.base" ? bf16 : f32));
  for (const int ranks : {1, 3}) {
    INFO(ranks << " ranks");
    const auto loaded = on_ranks(ranks, [&](World& world) {
      Adapters model, wide, again;
      make(model, world, 4);
      model.load(path);
      make(wide, world, 5, true);  // 8 bits of a file become f32,
      wide.load(path);
      make(again, world, 6);  // and f32 of a state dict 8 bits, which these values have
      again.load(wide.state_dict());
      std::vector<Values> all;
      for (const Adapters* const each : {&model, &wide, &again})
        all.push_back(values_of(each->state_dict({.form = StateForm::full})));
      return all;
    });
    for (const Values& values : loaded[0]) CHECK(same_bits(values, saved.values));
  }
}

TEST_CASE("what is trained is stored in f32, and a dtype is given before there is memory") {
  const Device device = Device::cpu({.threads = 1});
  const auto refused = [](const auto& f) { return thrown_by(f); };
  Adapters model;
  CHECK_THAT(refused([&] { model.a.down.set_dtype(bf16); }),
             Contains("set_dtype: parameter 'down' is trainable"));
  model.named_parameters();  // gives names
  CHECK_THAT(refused([&] { model.a.down.set_dtype(bf16); }),
             Contains("set_dtype: parameter 'a.down' is trainable, and trained parameters are "
                      "stored in f32; freeze it first"));
  CHECK_THAT(refused([&] { model.a.base.set_dtype(i32); }), Contains("'a.base' in i32; expected"));
  model.a.base.set_dtype(e4m3);
  CHECK_THAT(refused([&] { model.a.base.set_trainable(true); }),
             Contains("set_trainable: parameter 'a.base' is stored in e4m3") &&
                 Contains("set_dtype(f32) before materialize"));
  model.materialize(device);
  CHECK_THAT(refused([&] { model.a.base.set_dtype(f32); }),
             Contains("'a.base' has memory; call it before materialize"));
  CHECK(model.a.base.shard().dtype() == e4m3);
  CHECK(model.b.base.dtype() == f32);
  // Without units it computes, and is then sharded as it is stored.
  nn::init(model, {3});
  const Tensor x = rows_of(1, 0, 2, 5, device);
  const auto alone = model(x).to_vector<float>();
  CHECK_THAT(refused([&] { linear(x, model.a.base); }), Contains("cast"));
  const World world = World::emulated(0, 1, {.threads = 1});
  Adapters other;
  other.a.base.set_dtype(e4m3);
  nn::init(other, {3}, world.device());
  cut_adapters(other, world, {});
  CHECK(other.a.base.dtype() == e4m3);
  CHECK(other(rows_of(1, 0, 2, 5, world.device())).to_vector<float>() == alone);
}
