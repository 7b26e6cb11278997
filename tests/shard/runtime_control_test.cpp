// What a program decides about units while it runs: unshard and reshard outside of calls, and how
// long units stay open.
#include "tessera/nn/embedding.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

std::vector<float> first_weight(TrainedStack& t) {
  return t.layer(0).weight.value().to_vector<float>();
}

}  // namespace

TEST_CASE("what is unsharded is read outside of calls, until it is resharded",
          "[threads][fsdp2-027][fsdp2-073]") {
  for (const int ranks : {1, 2, 3})
    for (const Reshard way : kWays) {
      INFO(ranks << " ranks");
      struct Seen {
        bool is_whole = false;
        std::uint64_t gathers = 0, again = 0, of_call = 0, after = 0;
        std::string closed;
      };
      for (const Seen& seen : on_ranks(ranks, [&](World& world) {
             TrainedStack t(world, way);
             Seen s;
             unshard(t.model);  // the root, before its first call
             const std::vector<float> scale = t.model.scale.value().to_vector<float>();
             reshard(t.model);
             s.gathers = t.gathers_of([&] { unshard(t.layer(0)); });
             const std::vector<float> weight = first_weight(t);
             s.again = t.gathers_of([&] { unshard(t.layer(0)); });
             const NoGradGuard no_gradient;
             s.of_call = t.gathers_of([&] { t.loss(); });
             unshard(t.layer(0));
             reshard(t.layer(0));
             reshard(t.layer(0));  // nothing
             s.closed = thrown_by([&] { first_weight(t); });
             s.after = t.gathers_of([&] { t.loss(); });
             Values values = full_values(t.model);
             s.is_whole = same_bits(values.at("scale"), scale) &&
                          same_bits(values.at("layers.0.weight"), weight);
             return s;
           })) {
        CHECK(seen.is_whole);
        CHECK(seen.gathers == (ranks > 1 ? 1 : 0));
        CHECK(seen.again == 0);
        CHECK(seen.of_call == (ranks > 1 ? 3 : 0));
        CHECK(seen.after == (ranks > 1 ? 4 : 0));
        CHECK_THAT(seen.closed, Contains("'layers.0.weight' of unit 'layers.0'") &&
                                    Contains("while the unit is closed"));
      }
    }
}

TEST_CASE("values of before an update are an error, and the next call gathers the new ones",
          "[threads]") {
  for (const int ranks : {1, 2})
    for (const bool is_read : {false, true}) {
      struct Seen {
        std::string stale;
        bool is_new = false;
        std::uint64_t gathers = 0;
      };
      for (const Seen& seen : on_ranks(ranks, [&](World& world) {
             TrainedStack t(world, Reshard::always);
             t.loss().backward();
             unshard(t.layer(0));
             if (is_read) first_weight(t);
             t.update();  // nobody may have waited for the gather that reads what it writes
             Seen s;
             s.stale = thrown_by([&] { first_weight(t); });
             unshard(t.layer(0));
             s.is_new = same_bits(first_weight(t), full_values(t.model).at("layers.0.weight"));
             t.layer(0).weight.edit([](const Tensor& rows) { raw::fill(rows, 0.5); });
             s.gathers = t.gathers_of([&] { t.loss().backward(); });
             unshard(t.layer(0));
             for (const float w : first_weight(t)) s.is_new = s.is_new && w == 0.5f;
             return s;
           })) {
        CHECK_THAT(seen.stale, Contains("updated") && Contains("call unshard again"));
        CHECK(seen.is_new);
        CHECK(seen.gathers == (ranks > 1 ? 8 : 0));
      }
    }
}

TEST_CASE("unshard and reshard say what they can't do") {
  const auto said = on_ranks(2, [](World& world) {
    std::vector<std::string> out;
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    Stack model({4, 4, 4});
    nn::Linear& layer = model.layers[0];
    for (const auto f : {unshard, reshard}) out.push_back(thrown_by([&] { f(layer); }));  // 0, 1
    model.shard(options);
    for (const auto f : {unshard, reshard}) out.push_back(thrown_by([&] { f(layer); }));  // 2, 3
    nn::init(model, {1}, world.device());
    out.push_back(thrown_by([&] { unshard(layer); }));  // 4
    unshard(model);
    out.push_back(thrown_by([&] { layer.call([&] { return reshard(layer), Tensor(); }); }));  // 5
    unshard(layer);
    Tensor held = layer.weight.value();
    out.push_back(thrown_by([&] { reshard(layer); }));  // 6
    held = {};
    for (const auto f : {unshard, reshard}) {
      const Tensor x = Tensor::ones({4}, f32, world.device()).require_grad();
      const Tensor y = autograd::record("f", {x}, raw::mul(x, x),
                                        [&](const Tensor&, autograd::Gradients&) { f(layer); });
      out.push_back(thrown_by([&] { sum(y).backward(); }));  // 7, 8
    }
    return out;
  });
  for (const std::vector<std::string>& out : said) {
    for (const std::size_t i : {0, 1}) CHECK_THAT(out[i], Contains("is not a unit"));
    for (const std::size_t i : {2, 3}) CHECK_THAT(out[i], Contains("has no memory yet"));
    CHECK_THAT(out[4], Contains("lies inside of another one"));
    CHECK_THAT(out[5], Contains("a call of unit") && Contains("is running"));
    CHECK_THAT(out[6], Contains("'layers.0.weight' is still referenced outside"));
    for (const std::size_t i : {7, 8}) CHECK_THAT(out[i], Contains("a backward pass"));
  }
}

TEST_CASE("units resharded by hand between forward and backward are gathered again",
          "[threads][fsdp2-070]") {
  for (const Reshard way : kWays)
    for (const auto& gathers : on_ranks(2, [&](World& world) {
           TrainedStack t(world, way);
           std::vector<std::uint64_t> seen;
           for (int k = 0; k < 4; ++k) {
             const Tensor loss = t.loss();
             for (const auto& [name, module] : t.model.named_modules())
               if (module->hook()) reshard(*module);
             seen.push_back(t.gathers_of([&] { loss.backward(); }));
             seen.push_back(shard_counters(t.model).unplanned_slots);
             t.update();
           }
           return seen;
         })) {
      for (const std::size_t k : {0, 2, 4, 6}) CHECK(gathers[k] == 4);
      CHECK(gathers[5] == gathers[3]);
      CHECK(gathers[7] == gathers[3]);
    }
}

TEST_CASE("whether units are gathered for backward may change between steps",
          "[threads][fsdp2-071]") {
  struct Row {
    Reshard first, then;
    bool recurse;
    std::uint64_t backward;
  };
  // Four units; what is called last stays where the way is automatic.
  const Row table[] = {{Reshard::never, Reshard::always, true, 4},
                       {Reshard::never, Reshard::always, false, 1},
                       {Reshard::always, Reshard::never, true, 0},
                       {Reshard::always, Reshard::never, false, 3},
                       {Reshard::always, Reshard::automatic, true, 2},
                       {Reshard::never, Reshard::automatic, false, 0}};
  for (const Row& row : table) {
    INFO(row.first << " to " << row.then << ", " << row.recurse);
    const auto seen = on_ranks(2, [&](World& world) {
      TrainedStack t(world, row.first);
      const auto step = [&] {
        const Tensor loss = t.loss();
        const std::uint64_t gathers = t.gathers_of([&] { loss.backward(); });
        t.update();
        return gathers;
      };
      std::vector<std::uint64_t> unplanned, backward;
      for (int round = 0; round < 6; ++round) {
        set_reshard_after_forward(t.model, row.first);
        step();
        set_reshard_after_forward(t.model, row.then, row.recurse);
        backward.push_back(step());
        unplanned.push_back(shard_counters(t.model).unplanned_slots);
      }
      const std::string inside = t.model.call([&] {
        return thrown_by([&] { set_reshard_after_forward(t.layer(0), Reshard::never); });
      });
      return std::tuple(backward, unplanned, inside);
    });
    for (const auto& [backward, unplanned, inside] : seen) {
      CHECK(backward.back() == row.backward);
      CHECK(unplanned[3] == unplanned.back());  // the alternation has come to rest
      CHECK_THAT(inside, Contains("do it between steps"));
    }
  }
}

TEST_CASE("units that backward leaves open are gathered once for several micro-batches",
          "[threads][fsdp2-044]") {
  constexpr int kSteps = 16;  // some until the way of stepping has come to rest
  for (const Reshard way : kWays) {
    const auto seen = on_ranks(2, [&](World& world) {
      TrainedStack t(world, way), plain(world, way);
      set_reshard_after_backward(t.model, false);
      std::vector<std::uint64_t> gathers, unplanned;
      for (int k = 0; k < kSteps; ++k) {
        gathers.push_back(t.gathers_of([&] {
          for (std::uint64_t micro = 0; micro < 3; ++micro) t.loss(7 + micro).backward();
        }));
        for (std::uint64_t micro = 0; micro < 3; ++micro) plain.loss(7 + micro).backward();
        t.update();
        plain.update();
        unplanned.push_back(shard_counters(t.model).unplanned_slots);
      }
      const bool is_same = same_bits(full_values(t.model), full_values(plain.model));
      set_reshard_after_backward(t.model, true);
      t.loss().backward();
      return std::tuple(gathers, unplanned, is_same, thrown_by([&] { first_weight(t); }));
    });
    for (const auto& [gathers, unplanned, is_same, closed] : seen) {
      if (way == Reshard::never) CHECK(gathers == std::vector<std::uint64_t>(kSteps, 4));
      if (way == Reshard::always) CHECK(gathers == std::vector<std::uint64_t>(kSteps, 4 + 3 * 4));
      CHECK(unplanned[kSteps - 3] == unplanned.back());
      CHECK(is_same);
      CHECK_THAT(closed, Contains("while the unit is closed"));
    }
  }
}

TEST_CASE("a unit is gathered once for all chunks of a loss, where the flags say so",
          "[threads][fsdp2-056]") {
  for (const auto& [gathers, closed] : on_ranks(2, [&](World& world) {
         TrainedStack t(world, Reshard::always);
         t.loss().backward();  // the root runs first
         set_reshard_after_forward(t.layer(2), Reshard::never);
         set_reshard_after_backward(t.layer(2), false);
         const std::uint64_t count = t.gathers_of([&] {
           for (int chunk = 0; chunk < 3; ++chunk)
             mean_square(t.layer(2)(rows_of(2, chunk, 1, 4, world.device()))).backward();
         });
         reshard(t.layer(2));
         return std::pair(count, thrown_by([&] { t.layer(2).weight.value(); }));
       })) {
    CHECK(gathers == 1);
    CHECK_THAT(closed, Contains("while the unit is closed"));
  }
}

TEST_CASE(
    "a list of norm and head is gathered once for all chunks of a loss, where the flags say so",
    "[threads][fsdp2-056]") {
  struct Chunked final : nn::Module {
    Chunked() { register_modules("trunk", trunk, "norm", norm, "head", head); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return chunk(trunk(x)); });
    }
    Tensor chunk(const Tensor& h) { return mean_square(head(norm(h))); }
    nn::Linear trunk{4, 4}, norm{4, 4}, head{4, 4};
  };
  for (const auto& [gathers, closed] : on_ranks(2, [](World& world) {
         Chunked m;
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .reshard_after_forward = Reshard::always};
         fully_shard(m.trunk, options);
         fully_shard({&m.norm, &m.head}, options);
         fully_shard(m, options);
         nn::init(m, {1}, world.device());
         m(rows_of(1, 0, 2, 4, world.device())).backward();  // the root runs first
         set_reshard_after_forward(m.norm, Reshard::never);
         set_reshard_after_backward(m.norm, false);
         const std::uint64_t before = shard_counters(m).gathers;
         for (int chunk = 0; chunk < 3; ++chunk)
           m.chunk(rows_of(2, chunk, 1, 4, world.device())).backward();
         const std::uint64_t count = shard_counters(m).gathers - before;
         reshard(m.norm);
         return std::pair(count, thrown_by([&] { m.head.weight.value(); }));
       })) {
    CHECK(gathers == 1);
    CHECK_THAT(closed, Contains("while the unit is closed"));
  }
}

TEST_CASE("what stays open for backward does so behind a unit that is called by itself",
          "[threads]") {
  for (const std::uint64_t gathers : on_ranks(2, [](World& world) {
         TrainedStack t(world, Reshard::never);
         t.loss().backward();
         const Tensor h = t.model(rows_of(1, 2 * world.rank(), 2, 4, world.device()));
         const Tensor loss = mean_square(t.layer(2)(h));
         return t.gathers_of([&] { loss.backward(); });
       }))
    CHECK(gathers == 1);  // of that unit, for its first call
}

TEST_CASE("the slices of a table stay open and are closed as their unit is told to", "[threads]") {
  struct Tabled final : nn::Module {
    Tabled() { register_modules("ids", ids, "layer", layer); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return layer(ids(x)); });
    }
    nn::Embedding ids{6, 4};
    nn::Linear layer{4, 4};
  };
  for (const auto& [plain, open, again] : on_ranks(2, [](World& world) {
         Tabled model;
         fully_shard(model, {.mesh = DeviceMesh::flat(world),
                             .reshard_after_forward = Reshard::always,
                             .slice_bytes = 1});
         nn::init(model, {1}, world.device());
         const auto gathers = [&] {
           const std::uint64_t before = shard_counters(model).gathers;
           for (int micro = 0; micro < 2; ++micro)
             mean_square(model(Tensor::arange(6, i64, world.device()))).backward();
           return shard_counters(model).gathers - before;
         };
         const std::uint64_t first = gathers();
         set_reshard_after_forward(model, Reshard::never);
         set_reshard_after_backward(model, false);
         gathers();
         const std::uint64_t none = gathers();
         set_reshard_after_forward(model, Reshard::always);
         set_reshard_after_backward(model, true);
         gathers();
         return std::tuple(first, none, gathers());
       })) {
    CHECK(plain == 2 * (3 + 2));  // three slices, which backward does not read
    CHECK(open == 0);
    CHECK(again == plain);
  }
}

TEST_CASE("a reset closes what was unsharded, and the step after it is as any other", "[threads]") {
  const auto run = [](bool fails) {
    return on_ranks(2, [fails](World& world) {
      TrainedStack t(world, Reshard::always);
      const auto step = [&] { t.loss().backward(), t.update(); };
      if (fails) {
        set_reshard_after_backward(t.model, false);
        set_modules_to_forward_prefetch(t.layer(0), {&t.layer(2)});
      }
      step();
      std::string closed;
      if (fails) {
        try {
          unshard(t.layer(1));
          t.loss().backward();
          if (world.rank() == 0) throw std::runtime_error("one rank");
          unshard(t.layer(0));
          t.loss().backward();
        } catch (const std::exception&) {
          reset(t.model);
          closed = thrown_by([&] { first_weight(t); });
        }
      }
      for (int k = 0; k < 3; ++k) step();
      return std::pair(closed, full_values(t.model));
    });
  };
  const auto plain = run(false), failed = run(true);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(failed[rank].first, Contains("while the unit is closed"));
    CHECK(same_bits(failed[rank].second, plain[rank].second));
  }
}

TEST_CASE("whether backward gathers a unit may change, and is an error where it reads it",
          "[threads]") {
  struct Shift final : nn::Module {
    Shift() { register_parameter("by", by); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return x + by.value(); });  // backward reads nothing of it
    }
    Parameter by{{4}, Initializer::normal(0, 1)};
  };
  struct Shifted final : nn::Module {
    Shifted() { register_modules("layer", layer, "shift", shift, "head", head); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return head(shift(layer(x))); });
    }
    nn::Linear layer{4, 4}, head{4, 4};
    Shift shift;
  };
  for (const auto& [read, unread, wrong] : on_ranks(2, [](World& world) {
         Shifted model;
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .reshard_after_forward = Reshard::always};
         fully_shard(model.layer, options);
         fully_shard(model.shift, options);
         fully_shard(model.head, options);
         fully_shard(model, options);
         nn::init(model, {1}, world.device());
         const auto gathers = [&] {
           const std::uint64_t before = shard_counters(model).gathers;
           mean_square(model(rows_of(1, 0, 2, 4, world.device()))).backward();
           return shard_counters(model).gathers - before;
         };
         const std::uint64_t all = gathers();
         set_unshard_in_backward(model.shift, false);
         const std::uint64_t without = gathers();
         set_unshard_in_backward(model.head, false);
         return std::tuple(all, without, thrown_by(gathers));
       })) {
    CHECK(read == 6);
    CHECK(unread == 5);
    CHECK_THAT(wrong, Contains("of shape [") && Contains("reads_parameters_in_backward"));
  }
}

TEST_CASE("who uses a shared parameter outside of its unit hears that it is shared") {
  struct Tied final : nn::Module {
    Tied() { register_modules("first", first, "second", second); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return second(first(x)); });
    }
    nn::Linear first{4, 4}, second{first.weight};
  };
  for (const std::string& said : on_ranks(2, [](World& world) {
         Tied model;
         fully_shard(model.first, {.mesh = DeviceMesh::flat(world)});
         fully_shard(model, {.mesh = DeviceMesh::flat(world)});
         nn::init(model, {1}, world.device());
         return thrown_by([&] { model(Tensor::zeros({2, 4}, f32, world.device())); });
       }))
    CHECK_THAT(said, Contains("'first.weight' of unit 'first' was used while the unit is closed") &&
                         Contains("or make one unit around all modules that share it"));
}

TEST_CASE("a method of a class that can't be changed runs as a call of its unit",
          "[threads][fsdp2-050]") {
  struct Theirs final : nn::Module {
    Theirs() { register_module("layer", layer); }
    Tensor encode(const Tensor& x) { return tanh(linear(x, layer.weight, layer.bias)); }
    nn::Linear layer{4, 4};
  };
  for (const auto& [outside, counters] : on_ranks(2, [](World& world) {
         Theirs model;
         fully_shard(model, {.mesh = DeviceMesh::flat(world)});
         nn::init(model, {1}, world.device());
         const Tensor x = rows_of(1, 0, 2, 4, world.device());
         std::string closed = thrown_by([&] { model.encode(x); });
         mean_square(model.call([&] { return model.encode(x); })).backward();
         return std::pair(closed, shard_counters(model));
       })) {
    CHECK_THAT(outside, Contains("has no memory yet") || Contains("while the unit is closed"));
    CHECK(counters.gathers == 1);
    CHECK(counters.reductions == 1);
  }
}
