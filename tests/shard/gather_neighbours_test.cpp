// Reshard::to(k): what forward has gathered stays in parts over k neighbours, and backward gathers
// it from them. The same bits, fewer ranks on the wire.
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/cuts.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

const std::vector<std::int64_t> kWidths{5, 7, 6, 3};

struct Neighbours {
  int ranks = 4, replicas = 1, k = 2;
  DType param = f32;
  Offload offload = Offload::none;
};
std::ostream& operator<<(std::ostream& out, const Neighbours& w) {
  return out << w.ranks << " ranks, " << w.replicas << " replicas, to(" << w.k << "), " << w.param
             << (w.offload == Offload::cpu ? ", offloaded" : "");
}

Tensor loss_of(Stack& model, const World& world, int k) {
  const auto seed = static_cast<std::uint64_t>(k);
  return mean_square(model(rows_of(seed, world.rank() * 4, 4, 5, world.device())));
}

// The parameters after three steps of two micro-batches, the first of which is evaluated between
// forward and backward too.
Values values_of(World& world, const Neighbours& way, Reshard reshard) {
  Stack model(kWidths);
  model.shard({.mesh = mesh_of(world, way.replicas),
               .precision = {.param = way.param},
               .reshard_after_forward = reshard,
               .piece_bytes = 64,
               .offload = way.offload});
  nn::init(model, {3}, world.device());
  optim::AdamW optimizer(model.parameters(), {.lr = 1e-2, .eps = 1e-2});
  for (int k = 0; k < 3; ++k) {
    for (int m = 0; m < 2; ++m) {
      const Tensor loss = loss_of(model, world, 2 * k + m);
      if (m == 0) {
        const NoGradGuard no_gradient;
        loss_of(model, world, 100 + k);
      }
      loss.backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return full_values(model);
}

// Gathers over all ranks that shard and over the neighbours, of `step` in a model that has run.
struct Submitted {
  std::uint64_t all = 0, near = 0;
  bool operator==(const Submitted&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Submitted& c) {
  return out << c.all << " of all, " << c.near << " of neighbours";
}
template <class F>
Submitted submitted_in(const World& world, int k, const F& step) {
  const int first = world.rank() / k * k;
  const RankGroup& near = *world.split(
      concat("dp_shard, ", k),
      world.ranks().subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(k)));
  const Submitted before{world.gather().submitted(), near.gather().submitted()};
  step();
  return {world.gather().submitted() - before.all, near.gather().submitted() - before.near};
}

}  // namespace

TEST_CASE("parts over neighbours train to the bits of full shards", "[shard][threads]") {
  for (const Neighbours& way :
       {Neighbours{}, Neighbours{.ranks = 6, .k = 3}, Neighbours{.ranks = 6, .k = 2},
        Neighbours{.ranks = 8, .replicas = 2}, Neighbours{.ranks = 8, .k = 4},
        Neighbours{.param = bf16}, Neighbours{.param = f16, .offload = Offload::cpu}}) {
    INFO(way);
    const auto values = [&](Reshard reshard) {
      return on_ranks(way.ranks, [&](World& world) { return values_of(world, way, reshard); })[0];
    };
    CHECK(same_bits(values(Reshard::to(way.k)), values(Reshard::always)));
  }
}

TEST_CASE("backward gathers from neighbours what forward gathered from all", "[shard][fsdp2-069]") {
  constexpr int k = 2;
  struct Found {
    Submitted step, second, twice, stale, changed;
    std::int64_t live = 0, planned = 0;
    std::string plan;
  };
  const auto results = on_ranks(4, [&](World& world) {
    Stack model(kWidths);
    model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::to(k)});
    nn::init(model, {3}, world.device());
    optim::SGD optimizer(model.parameters(), {.lr = 1e-3});
    const auto step = [&] { loss_of(model, world, 1).backward(); };
    step();
    Found found;
    found.step = submitted_in(world, k, step);
    found.second = submitted_in(world, k, step);
    // Two forwards, two backwards: the parts are of one, and let go of by the first backward.
    found.twice = submitted_in(world, k, [&] {
      const Tensor a = loss_of(model, world, 1), b = loss_of(model, world, 2);
      b.backward();
      a.backward();
    });
    // What a forward without backward has left is not what the next step reads; its calls are
    // walked through all the same, and gathered from all.
    found.stale = submitted_in(world, k, [&] {
      loss_of(model, world, 1);
      optimizer.step();
      loss_of(model, world, 1).backward();
    });
    optimizer.zero_grad();
    const auto live = [&] {
      return Memory::of(world.device()).ledger().live_bytes("shards after forward");
    };
    const std::int64_t before = live();
    {
      const Tensor loss = loss_of(model, world, 1);
      found.live = live() - before;
      loss.backward();
      found.live += live();  // nothing more
    }
    for (const ShardPlan::Unit& unit : shard_plan(model).units)
      found.planned += unit.post_forward_bytes;
    found.plan = shard_plan(model).to_string();
    set_reshard_after_forward(model, Reshard::always);
    found.changed = submitted_in(world, k, step);
    set_reshard_after_forward(model, Reshard::to(k));
    return found;
  });
  for (const Found& found : results) {
    CHECK(found.step == Submitted{4, 4});  // three layers and the root
    CHECK(found.second == found.step);
    CHECK(found.twice == Submitted{12, 4});
    CHECK(found.stale == Submitted{12, 4});
    CHECK(found.changed == Submitted{8, 0});
    CHECK(found.planned > 0);
    CHECK(found.live == found.planned);
    CHECK_THAT(found.plan, Contains("f32    f32     to 2"));
    CHECK_THAT(found.plan, Contains("  from forward to backward 2,048 bytes of parameters stay"));
  }
}

TEST_CASE("what backward does not read has no parts, unless the program says otherwise",
          "[shard]") {
  struct Shifted final : nn::Module {
    Shifted() { register_modules("table", table, "shift", shift, "layer", layer); }
    Tensor operator()(const Tensor& ids) {
      return call([&] { return layer(shift(table(ids))); });
    }
    nn::Embedding table{11, 6};
    Shift shift{6, false};
    nn::Linear layer{6, 6};
  };
  struct Parts {
    std::map<std::string, std::int64_t> planned;
    std::int64_t kept = 0;
  };
  for (const auto& [unread, read] : on_ranks(4, [](World& world) {
         Shifted model;
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .reshard_after_forward = Reshard::to(2)};
         shard_each({&model.shift, &model.layer, &model}, options);
         nn::init(model, {1}, world.device());
         const auto parts = [&] {
           Parts found;
           const Tensor loss = mean_square(model(Tensor::arange(3, i32, world.device())));
           found.kept = Memory::of(world.device()).ledger().live_bytes("shards after forward");
           loss.backward();
           for (const ShardPlan::Unit& unit : shard_plan(model).units)
             found.planned[unit.name] = unit.post_forward_bytes;
           return found;
         };
         const Parts unread = parts();
         set_unshard_in_backward(model.shift, true);
         return std::pair(unread, parts());
       })) {
    CHECK(unread.planned.at("table.weight[0]") == 0);
    CHECK(unread.planned.at("shift") == 0);
    CHECK(unread.planned.at("layer") > 0);
    CHECK(unread.kept == unread.planned.at("layer"));
    CHECK(read.planned.at("shift") > 0);
    CHECK(read.kept == read.planned.at("layer") + read.planned.at("shift"));
  }
}

TEST_CASE("neighbours that are no proper part of the ranks are refused", "[shard]") {
  const auto errors = on_ranks(4, [&](World& world) {
    std::vector<std::string> found;
    const DeviceMesh mesh = DeviceMesh::flat(world);
    for (const int k : {-1, 0, 1, 3, 4, 8})
      found.push_back(thrown_by(
          [&] { Stack(kWidths).shard({.mesh = mesh, .reshard_after_forward = Reshard::to(k)}); }));
    Stack model(kWidths);
    model.shard({.mesh = mesh});
    found.push_back(thrown_by([&] { set_reshard_after_forward(model, Reshard::to(3)); }));
    return found;
  });
  for (const auto& found : errors) {
    CHECK_THAT(found[3],
               Contains("fully_shard: the module of 'weight': Reshard::to(3) does not split the 4 "
                        "ranks that shard; give a divisor above 1 and below 4"));
    for (std::size_t i = 0; i < 6; ++i) CHECK_THAT(found[i], Contains("the 4 ranks that shard"));
    CHECK_THAT(found[6], Contains("set_reshard_after_forward: unit '(with scale)': Reshard::to(3) "
                                  "does not split the 4 ranks"));
  }
}

TEST_CASE("neighbours need all ranks of the world in the mesh", "[shard]") {
  const auto errors = on_ranks(5, [&](World& world) -> std::string {
    const std::vector<int> ranks{0, 1, 2, 3};
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"dp_shard", 4}}, ranks);
    if (!mesh.is_member()) return "";
    return thrown_by(
        [&] { Stack(kWidths).shard({.mesh = mesh, .reshard_after_forward = Reshard::to(2)}); });
  });
  CHECK_THAT(errors[0], Contains("but 1 are not in the mesh; use Reshard::always"));
}

TEST_CASE("ranks that keep parts over other neighbours are told so", "[shard]") {
  const auto errors = on_ranks(4, [&](World& world) {
    Stack model(kWidths);
    model.shard({.mesh = DeviceMesh::flat(world),
                 .reshard_after_forward = world.rank() == 0 ? Reshard::always : Reshard::to(2)});
    model.materialize(world.device());
    return thrown_by([&] { shard_plan(model); });
  });
  CHECK_THAT(errors[0], Contains("differs between ranks in reshard_after_forward; here: "));
  CHECK_THAT(errors[1], Contains("here: to(2)"));
}

TEST_CASE("a step that failed leaves no parts behind", "[shard][threads]") {
  const auto results = on_ranks(4, [&](World& world) {
    Stack model(kWidths);
    model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::to(2)});
    nn::init(model, {3}, world.device());
    loss_of(model, world, 1).backward();
    const Tensor lost = loss_of(model, world, 2);
    reset(model);
    return submitted_in(world, 2, [&] { loss_of(model, world, 1).backward(); });
  });
  for (const Submitted& counted : results) CHECK(counted == Submitted{4, 4});
}

TEST_CASE("parts are kept through lists, slices, recompute, masks and what a program decides",
          "[shard][threads]") {
  const auto train = [](World& world, Reshard reshard, bool is_encoded) {
    nn::Llama model(small_llama(2, nn::Recompute::blocks));
    if (is_encoded) {
      for (const Parameter& p : model.blocks[0].parameters())
        if (p.shape().ndim() > 1) {
          p.freeze();
          p.set_dtype(bf16);
        }
      for (const Parameter& p : model.parameters())
        if (p.shape().ndim() > 1 && p.trainable()) p.set_gather_transform(gather_in_e4m3());
    }
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .precision = {.param = bf16},
                               .reshard_after_forward = reshard,
                               .slice_bytes = 1};
    for (nn::LlamaBlock& block : model.blocks) fully_shard(block, options);
    fully_shard({&model.norm, &model.head}, options);
    fully_shard(model, options);
    nn::init(model, {5}, world.device());
    optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
    const auto loss = [&](int k) {
      std::vector<std::int32_t> ids;
      for (int i = 0; i < 5; ++i) ids.push_back((3 * i + 5 * k + world.rank()) % 11);
      const Tensor all = Tensor::from(ids, {1, 5}, world.device());
      return model.loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5));
    };
    for (int k = 0; k < 4; ++k) {
      const Tensor a = loss(k), b = loss(k + 1);
      b.backward();
      {
        const NoGradGuard no_gradient;
        loss(k + 2);
      }
      a.backward();
      {
        const Tensor c = loss(k + 3);
        set_reshard_after_forward(model, Reshard::always);
        c.backward();
        const Tensor d = loss(k + 4);
        set_reshard_after_forward(model, reshard);
        d.backward();
      }
      const Tensor e = loss(k + 5);
      unshard(model.blocks[0]);
      e.backward();
      set_reshard_after_backward(model.blocks[1], k % 2 == 1);
      loss(k + 6).backward();
      optimizer.step();
      optimizer.zero_grad();
      model.norm.weight.set_trainable(k % 2 == 1);
    }
    Values values;
    for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
      values[name] = raw::cast(full, f32).to_vector<float>();
    });
    return values;
  };
  for (const bool is_encoded : {false, true}) {
    CAPTURE(is_encoded);
    const auto run = [&](Reshard reshard) {
      return on_ranks(4, [&](World& world) { return train(world, reshard, is_encoded); })[0];
    };
    CHECK(same_bits(run(Reshard::to(2)), run(Reshard::always)));
  }
}

TEST_CASE("an exception at any launch of a step that keeps parts ends in a reset as any other",
          "[shard][threads]") {
  struct Found {
    bool is_cut = false, is_consistent = true, is_same = false;
  };
  int tried = 0;
  for (bool is_cut = true; is_cut; ++tried) {
    CAPTURE(tried);
    const auto results = on_ranks(4, [&](World& world) {
      if (tried % 2 == 1) Memory::of(world.device()).poison_freed();
      Stack model(kWidths);
      for (const Parameter& p : model.layers[1].parameters())
        if (p.shape().ndim() > 1) p.set_gather_transform(gather_in_e4m3());
      model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::to(2)});
      nn::init(model, {3}, world.device());
      optim::SGD optimizer(model.parameters(), {.lr = 1e-3});
      const auto step = [&] {
        loss_of(model, world, 1).backward();
        Values gradients = shard_gradients(model);
        optimizer.zero_grad();
        return gradients;
      };
      const Values expected = step();
      Found found;
      const auto cut = std::make_shared<Cuts>(world.rank() == 1 ? tried + 1 : 0);
      world.device().synchronize();  // nobody is told while the list of observers grows
      world.device().context().add_observer(cut);
      try {
        step();
        world.barrier();
      } catch (const std::exception&) {
        found.is_consistent = reset(model).parameters_are_consistent;
      }
      found.is_cut = cut->left <= 0;  // which a step survives where it only poisons freed memory
      cut->left = 0;
      found.is_same = same_bits(step(), expected);
      return found;
    });
    for (const Found& found : results) {
      CHECK(found.is_same);
      CHECK(found.is_consistent);
    }
    is_cut = results[1].is_cut;
  }
  CHECK(tried > 60);
}
