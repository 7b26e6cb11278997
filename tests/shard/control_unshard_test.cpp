// Units that a program opens and closes by hand, outside of their calls: unshard and reshard.
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("what is unsharded is read outside of calls, until it is resharded",
          "[threads][fsdp2-027][fsdp2-073]") {
  for (const int ranks : {1, 2, 3})
    for (const Reshard way : kReshards) {
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
             const std::vector<float> weight = t.first_weight();
             s.again = t.gathers_of([&] { unshard(t.layer(0)); });
             const NoGradGuard no_gradient;
             s.of_call = t.gathers_of([&] { t.loss(); });
             unshard(t.layer(0));
             reshard(t.layer(0));
             reshard(t.layer(0));  // nothing
             s.closed = thrown_by([&] { t.first_weight(); });
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
        CHECK(seen.after == (ranks == 1 ? 0 : way == Reshard::never ? 1 : 4));
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
             if (is_read) t.first_weight();
             t.update();  // nobody may have waited for the gather that reads what it writes
             Seen s;
             s.stale = thrown_by([&] { t.first_weight(); });
             unshard(t.layer(0));
             s.is_new = same_bits(t.first_weight(), full_values(t.model).at("layers.0.weight"));
             t.layer(0).weight.edit([](const Tensor& rows) { raw::fill(rows, 0.5); });
             s.gathers = t.gathers_of([&] { t.loss().backward(); });
             unshard(t.layer(0));
             for (const float w : t.first_weight()) s.is_new = s.is_new && w == 0.5f;
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
    CHECK_THAT(out[4], Contains("lies inside another unit"));
    CHECK_THAT(out[5], Contains("a call of unit") && Contains("is running"));
    CHECK_THAT(out[6], Contains("'layers.0.weight' is still referenced outside"));
    for (const std::size_t i : {7, 8}) CHECK_THAT(out[i], Contains("a backward pass"));
  }
}

TEST_CASE("units resharded by hand between forward and backward are gathered again",
          "[threads][fsdp2-070]") {
  for (const Reshard way : kReshards)
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
          world.device().synchronize();  // a host that runs ahead has heard of nothing yet
        } catch (const std::exception&) {
          reset(t.model);
          closed = thrown_by([&] { t.first_weight(); });
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
