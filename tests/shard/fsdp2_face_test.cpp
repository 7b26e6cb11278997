// What fully_shard makes of a tree of modules, and what a rank has of it before, between and after
// passes: FSDP2's tests of construction, registration and state, with our words.
#include <algorithm>
#include <type_traits>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

// A module is no value: a sharded one is never copied.
static_assert(!std::is_copy_constructible_v<nn::Linear>);

namespace {

struct Mlps final : nn::Module {
  explicit Mlps(std::int64_t dim) : shared(dim, dim), again(shared.weight) {
    for (int i = 0; i < 3; ++i) mlps.emplace_back(std::vector<std::int64_t>{dim, 3 * dim, dim});
    register_modules("mlps", mlps, "shared", shared, "again", again);
    apply<nn::Linear>([](nn::Linear& layer) {  // no gradient that is below f16's numbers
      layer.weight.set_initializer(Initializer::normal(0, 0.5));
    });
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& given) {
          Tensor h = shared(given);
          for (Mlp& mlp : mlps) h = mlp(h);
          return again(h);
        },
        x);
  }
  void shard(const ShardOptions& options) {
    for (Mlp& mlp : mlps) fully_shard(mlp, options);
    fully_shard(*this, options);
  }
  nn::ModuleList<Mlp> mlps;
  nn::Linear shared, again;
};

struct NamedUnit {
  std::string name;
  std::int64_t parameters, numel;
  bool operator==(const NamedUnit&) const = default;
};
std::ostream& operator<<(std::ostream& out, const NamedUnit& u) {
  return out << u.name << ' ' << u.parameters << ' ' << u.numel;
}
std::vector<NamedUnit> units_of(nn::Module& root, const World& world) {
  root.materialize(world.device());
  std::vector<NamedUnit> units;
  for (const ShardPlan::Unit& u : shard_plan(root).units)
    units.push_back({u.name, u.parameters, u.numel});
  return units;
}

}  // namespace

TEST_CASE("each call makes a unit of what is below its module, once, and leaves the other modules",
          "[fsdp2-001][fsdp2-003][fsdp2-008][fsdp2-012]") {
  const World world = World::single();
  const ShardOptions options{.mesh = DeviceMesh::flat(world)};
  Mlps model(3);
  model.shard(options);
  // 9 x 3 + 9 and 3 x 9 + 3; the shared weight once, with the bias of its first owner.
  CHECK(units_of(model, world) ==
        std::vector<NamedUnit>{
            {"(root)", 2, 12}, {"mlps.0", 4, 66}, {"mlps.1", 4, 66}, {"mlps.2", 4, 66}});
  CHECK(model.shared.weight.unit() == model.again.weight.unit());
  for (const auto& [name, p] : model.named_parameters()) CHECK(p.name() == name);

  Mlp alone({3, 9, 3});
  fully_shard(alone.layers[0], options);
  CHECK(alone.layers[0].hook() != nullptr);
  CHECK(alone.hook() == nullptr);
  CHECK(alone.layers[1].hook() == nullptr);
}

TEST_CASE("a list that nobody calls opens nothing, and its layers say so", "[fsdp2-004]") {
  const World world = World::single();
  Stack model({4, 4, 4});
  fully_shard(model.layers, {.mesh = DeviceMesh::flat(world)});
  nn::init(model, {1}, world.device());
  CHECK_THAT(thrown_by([&] { model(rows_of(1, 0, 2, 4, world.device())); }),
             Contains("'layers.0.") && Contains("inside a call of the module"));
}

TEST_CASE("materialize puts parameters and buffers on the world's device, and leaves the rest",
          "[threads][fsdp2-005]") {
  struct Counting final : nn::Module {
    Counting() {
      register_modules("layer", layer, "own", own);
      register_buffer("mean", mean);
    }
    nn::Linear layer{4, 4}, own{4, 4};
    nn::Buffer mean{{4}, Initializer::constant(1)};
    Tensor no_state;
  };
  struct Found {
    bool moved = true, stays = true, moves_when_told = true;
    std::string elsewhere;
  };
  for (const auto& [moved, stays, moves_when_told, elsewhere] : on_ranks(2, [](World& world) {
         const Device host = Device::cpu(), device = world.device();
         const Tensor x = rows_of(1, 0, 2, 4, device);
         Found f;
         for (const bool is_on_host : {true, false}) {
           Counting model;
           model.no_state = Tensor::ones({4}, f32, host);
           fully_shard(model, {.mesh = DeviceMesh::flat(world), .ignored = model.own.parameters()});
           for (const Parameter& p : model.own.parameters())
             f.stays = f.stays && !p.unit() && p.device().is_meta();
           std::vector<float> values;
           if (is_on_host) {
             nn::init(model.own, {1}, host);
             values = model.own.weight.shard().to_vector<float>();
           }
           model.materialize(device);
           for (const Parameter& p : model.layer.parameters())
             f.moved =
                 f.moved && p.unit() && p.shard().device() == device && p.shard().shape()[0] == 2;
           f.moved = f.moved && model.mean.value().device() == device;
           for (const Parameter& p : model.own.parameters())
             (is_on_host ? f.stays : f.moves_when_told) &=
                 p.shard().device() == (is_on_host ? host : device) &&
                 p.shard().shape() == p.shape();
           f.stays = f.stays && model.no_state.device() == host && host != device;
           if (!is_on_host) continue;
           f.stays = f.stays && same_bits(model.own.weight.shard().to_vector<float>(), values);
           f.elsewhere = thrown_by([&] { model.own(x); });
         }
         return f;
       })) {
    CHECK(moved);
    CHECK(stays);
    CHECK(moves_when_told);
    CHECK_THAT(elsewhere, Contains("device"));
  }
}

TEST_CASE("every parameter has the shape of the whole and its rank's rows",
          "[threads][fsdp2-009]") {
  for (const int ranks : {2, 4}) {
    const auto fit = on_ranks(ranks, [](World& world) {
      Mlps model(3);
      nn::init(model, {4}, world.device());
      std::map<std::string, Tensor> before;
      for (const auto& [name, p] : model.named_parameters())
        before[name] = Tensor::from(p.shard().to_vector<float>(), p.shape(), world.device());
      model.shard({.mesh = DeviceMesh::flat(world)});
      bool fits = true;
      for (const auto& [name, p] : model.named_parameters()) {
        const Tensor& whole = before.at(name);
        const RowRange rows = ShardSpec{whole.shape(), world.size(), world.rank()}.owned();
        const DistributedTensor t = p.distributed();
        fits = fits && t.shape() == whole.shape() && t.placements() == Placements{Shard{}} &&
               same_bits(t.local().to_vector<float>(),
                         raw::slice(whole, 0, rows.begin, rows.end).to_vector<float>());
      }
      return fits;
    });
    CHECK(fit == std::vector<bool>(fit.size(), true));
  }
}

TEST_CASE("values that are written before the first call are those that it computes with",
          "[threads][fsdp2-014]") {
  // Each weight becomes its half, a power of two: the same bits as of a plain model's halves.
  const auto run = [](int ranks, bool shards) {
    return on_ranks(ranks, [&](World& world) {
      Mlps model(4);
      if (shards) model.shard({.mesh = DeviceMesh::flat(world)});
      nn::init(model, {6}, world.device());
      for (const Parameter& p : model.parameters()) p.assign(raw::mul(p.shard(), 0.5));
      const Tensor loss = mean_square(model(rows_of(3, 0, 4, 4, world.device())));
      loss.backward();
      return std::pair(loss.to_vector<float>(), shard_gradients(model));
    });
  };
  const auto plain = run(1, false);
  for (const int ranks : {1, 2, 4}) {
    const auto sharded = run(ranks, true);
    std::vector<Values> rows;
    for (const auto& [loss, gradients] : sharded) {
      CHECK(same_bits(loss, plain[0].first));
      rows.push_back(gradients);
    }
    // The mean over 1, 2 or 4 ranks of the same gradients is exact.
    CHECK(same_bits(assemble(rows), plain[0].second));
  }
}

TEST_CASE("models of 8, 3 and 1 start on 4 ranks with the values of one, and train",
          "[threads][fsdp2-015]") {
  for (const DType param : {f32, bf16, f16})
    for (const std::int64_t dim : {8, 3, 1}) {
      INFO(param << ", dim " << dim);
      const auto run = [&](int ranks) {
        return on_ranks(ranks, [&](World& world) {
          Mlps model(dim);
          model.shard({.mesh = DeviceMesh::flat(world), .precision = {.param = param}});
          nn::init(model, {6}, world.device());
          const Values start = full_values(model);
          optim::AdamW optimizer(model.parameters(), {.lr = 0.1, .eps = 1e-30});
          mean_square(model(rows_of(3, 0, 2, dim, world.device()))).backward();
          optimizer.step();
          return std::pair(start, full_values(model));
        })[0];
      };
      const auto [start, trained] = run(4);
      CHECK(same_bits(start, run(1).first));
      for (const auto& [name, values] : trained) {
        CHECK_FALSE(same_bits(values, start.at(name)));
        for (const float v : values) CHECK(std::isfinite(v));
      }
    }
}

TEST_CASE("a parameter is its shard before, between and after passes, and whole within its call",
          "[threads][fsdp2-027][fsdp2-028]") {
  for (const Reshard reshard :
       {Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)}) {
    INFO("reshard " << reshard);
    struct Found {
      bool is_shard = true;
      std::string outside;
      std::vector<float> whole;
    };
    const auto found = on_ranks(reshard.is_partial() ? 4 : 2, [&](World& world) {
      Mlps model(3);
      start(model, world, 4, reshard);
      const Parameter& weight = model.mlps[1].layers[0].weight;
      const std::vector<float> rows = weight.shard().to_vector<float>();
      Found f;
      const auto look = [&] {
        f.is_shard = f.is_shard && weight.shape() == Shape{9, 3} &&
                     same_bits(weight.shard().to_vector<float>(), rows);
      };
      look();
      const Tensor loss = mean_square(model(rows_of(3, 0, 2, 3, world.device())));
      look();
      model.mlps[1].call([&] {
        look();
        f.whole = weight.value().detach().to_vector<float>();
        return 0;
      });
      loss.backward();
      look();
      f.outside = thrown_by([&] { weight.value(); });
      look();
      f.is_shard = f.is_shard && weight.grad().shape() == weight.shard().shape();
      return f;
    });
    for (const Found& f : found) {
      CHECK(f.is_shard);
      CHECK_THAT(f.outside,
                 Contains("mlps.1.layers.0.weight") && Contains("inside a call of the module"));
      CHECK(same_bits(f.whole, found[0].whole));
    }
    CHECK(found[0].whole.size() == 27);
  }
}

TEST_CASE("views of state are the shards, over updates and passes, and a load writes them back",
          "[threads][fsdp2-106][fsdp2-107]") {
  for (const auto& [ranks, replicas] : {std::pair(1, 1), {2, 1}, {4, 1}, {2, 2}, {4, 2}})
    for (const std::int64_t dim : {2, 3, 4, 5}) {
      INFO(ranks << " ranks, " << replicas << " replicas, dim " << dim);
      const auto fit = on_ranks(ranks, [&, replicas = replicas](World& world) {
        Mlps model(dim);
        model.shard({.mesh = mesh_of(world, replicas), .reshard_after_forward = Reshard::never});
        nn::init(model, {4}, world.device());
        optim::AdamW optimizer(model.parameters(), {.lr = 0.1});
        const StateDict start = model.state_dict(),
                        views = model.state_dict({.form = StateForm::view});
        bool fits = true, moved = false;
        const auto look = [&] {
          for (const auto& [name, p] : model.named_parameters()) {
            const Tensor& view = views.at(name).values;
            fits = fits && view.shape() == p.shard().shape() && view.data() == p.shard().data();
          }
        };
        for (int step = 0; step < 5; ++step) {
          const Tensor loss = mean_square(model(rows_of(3, 0, 2, dim, world.device())));
          look();
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          look();
        }
        const auto values = [&](const StateDict& state) {
          Values all;
          for (const auto& [name, p] : model.named_parameters())
            all[name] = state.at(name).values.to_vector<float>();
          return all;
        };
        // Rank 0 has rows of every parameter; of 2 rows on 4 ranks some others have none.
        moved = !same_bits(values(views), values(start)) || world.rank() > 0;
        model.load(start);
        look();
        return fits && moved && same_bits(values(views), values(start));
      });
      CHECK(fit == std::vector<bool>(fit.size(), true));
    }
}

TEST_CASE("a mesh of ranks that are named one by one trains as one of as many",
          "[threads][fsdp2-019]") {
  // `place`: of this rank in the mesh, row by row.
  const auto train = [](World& world, const DeviceMesh& mesh, int place) {
    Mlps model(4);
    model.shard({.mesh = mesh});
    nn::init(model, {4}, world.device());
    const Tensor loss = mean_square(model(rows_of(3, 2 * place, 2, 4, world.device())));
    loss.backward();
    Values seen = shard_gradients(model);
    seen["loss"] = loss.to_vector<float>();
    return seen;
  };
  const auto flat = on_ranks(
      2, [&](World& world) { return train(world, DeviceMesh::flat(world), world.rank()); });
  const auto named = on_ranks(3, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"dp_shard", 2}}, std::vector<int>{2, 0});
    return mesh.is_member() ? train(world, mesh, mesh.shard_rank()) : Values();
  });
  CHECK(same_bits(named[2], flat[0]));
  CHECK(same_bits(named[0], flat[1]));
  CHECK(named[1].empty());
  // Two dimensions: rows of 3, 1 and of 0, 4.
  const std::vector<int> ranks = {3, 1, 0, 4};
  const auto hybrid = on_ranks(4, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
    return train(world, mesh, world.rank());
  });
  const auto chosen = on_ranks(5, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"dp_replicate", 2}, {"dp_shard", 2}}, ranks);
    if (!mesh.is_member() || !std::ranges::equal(mesh.ranks(), ranks)) return Values();
    return train(world, mesh, mesh.group("dp_replicate").rank() * 2 + mesh.shard_rank());
  });
  for (std::size_t place = 0; place < ranks.size(); ++place)
    CHECK(same_bits(chosen[static_cast<std::size_t>(ranks[place])], hybrid[place]));
  CHECK(!same_bits(hybrid[0], flat[0]));
  CHECK(chosen[2].empty());
}
