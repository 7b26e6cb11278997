// What fully_shard leaves as it was: handles, names, values; and what may not leave a call.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tessera/memory/memory.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

const std::vector<std::int64_t> kWidths = {5, 7, 1, 3};  // 1 row: most ranks own nothing of it

nn::LlamaConfig tiny_llama() {
  return {.dim = 12,
          .n_layers = 2,
          .n_heads = 2,
          .n_kv_heads = 1,
          .ffn_dim = 20,
          .vocab_size = 13,
          .max_seq_len = 8};
}

// Three steps of AdamW; the optimizer is made before or after the model is sharded.
Values train(World& world, bool optimizer_first) {
  Stack model(kWidths);
  const auto make = [&] {
    return std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 0.05});
  };
  std::unique_ptr<optim::AdamW> optimizer = optimizer_first ? make() : nullptr;
  model.shard({.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  if (!optimizer) optimizer = make();
  nn::init(model, {11});
  for (int step = 0; step < 3; ++step) {
    mean_square(model(rows_of(5, 8 * step + 2 * world.rank(), 2, 5, world.device()))).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return full_values(model);
}

}  // namespace

TEST_CASE("a model that has its values shrinks unit by unit while it is sharded", "[threads]") {
  constexpr std::int64_t kUnit = 20 << 20, kUnits = 4, kTables = 1 << 16;  // bytes
  const auto held = on_ranks(2, [](World& world) {
    struct Wide final : nn::Module {
      Wide() {
        const nn::LinearOptions no_bias{.bias = false};
        for (int i = 0; i < kUnits; ++i) layers.emplace_back(2048, kUnit / 2048 / 4, no_bias);
        register_module("layers", layers);
      }
      nn::ModuleList<nn::Linear> layers;
    } model;
    model.materialize(world.device());
    Ledger& ledger = Memory::of(world.device()).ledger();
    std::vector<std::pair<std::int64_t, std::int64_t>> out;  // live, peak after each
    for (nn::Linear& layer : model.layers) {
      ledger.reset_peak();
      fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
      out.emplace_back(ledger.live_bytes(), ledger.peak_bytes());
    }
    return out;
  });
  for (const auto& rank : held)
    for (std::int64_t i = 0; i < kUnits; ++i) {
      const auto [live, peak] = rank[static_cast<std::size_t>(i)];
      const std::int64_t before = i * kUnit / 2 + (kUnits - i) * kUnit;
      CHECK(live <= before - kUnit / 2 + kTables);
      CHECK(peak <= before + kUnit / 2 + kTables);
    }
}

TEST_CASE("a parameter used outside its unit's call is an error that names both",
          "[threads][fsdp2-028]") {
  const auto messages = on_ranks(2, [](World& world) {
    Stack model(kWidths);
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    shard_plan(model);
    return thrown_by([&] { model.layers[1].weight.value(); });
  });
  for (const std::string& message : messages)
    CHECK_THAT(message, Contains("'layers.1.weight'") && Contains("unit 'layers.1'") &&
                            Contains("inside the module's call"));
}

TEST_CASE("a full parameter that leaves its unit's call is named with the operation that used it",
          "[threads]") {
  class Leaky final : public nn::Module {
   public:
    Leaky() : layer(4, 4) { register_module("layer", layer); }
    Tensor operator()(const Tensor& x, bool leaks) {
      return call([&] {
        if (leaks) kept = weight_of_layer();
        return layer(x);
      });
    }
    Tensor weight_of_layer() {
      return layer.call([&] {
        Tensor whole = layer.weight.value();
        tanh(whole);
        return whole;
      });
    }
    nn::Linear layer;
    Tensor kept;
  };
  struct Result {
    std::string message, later;
    bool works_again = false;
  };
  const auto results = on_ranks(2, [](World& world) {
    Leaky model;
    fully_shard(model.layer, {.mesh = DeviceMesh::flat(world)});
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    const Tensor x = rows_of(1, 0, 2, 4, world.device());
    Result result;
    result.message = thrown_by([&] { model(x, true); });
    model.kept = {};
    const Tensor y = model(x, false);
    y.backward(Tensor::ones(y.shape(), f32, world.device()));
    result.works_again = model.layer.weight.grad().defined();
    return result;
  });
  for (const Result& result : results) {
    CHECK_THAT(result.message,
               Contains("unit 'layer'") && Contains("'layer.weight'") && Contains("'tanh'"));
    CHECK(result.works_again);
  }
}

TEST_CASE("a full parameter in the closure of a custom operation is an error that says Saved",
          "[threads]") {
  // x * weight, of one element each.
  class Product final : public nn::Module {
   public:
    explicit Product(bool saves) : saves_(saves) { register_parameter("weight", weight); }
    Tensor operator()(const Tensor& x) {
      return call([&] {
        const Tensor w = weight.value(), y = raw::mul(x, w);
        if (saves_)
          return autograd::record(
              "product", {x}, y,
              [w = autograd::Saved(w)](const Tensor& g, autograd::Gradients& out) {
                out.set(0, raw::mul(g, w.get()));
              });
        return autograd::record("product", {x}, y, [w](const Tensor& g, autograd::Gradients& out) {
          out.set(0, raw::mul(g, w));
        });
      });
    }
    Parameter weight{{1}, Initializer::constant(3)};

   private:
    bool saves_;
  };
  for (const int ranks : {1, 2})
    for (const bool saves : {false, true})
      for (const auto& [message, gradient] : on_ranks(ranks, [&](World& world) {
             Product model(saves);
             fully_shard(model, {.mesh = DeviceMesh::flat(world),
                                 .reshard_after_forward = Reshard::always});
             nn::init(model, {1}, world.device());
             Tensor x = Tensor::ones({1}, f32, world.device());
             x.require_grad();
             const std::string what = thrown_by([&] { sum(model(x)).backward(); });
             return std::pair(what, x.grad().defined() ? x.grad().item() : 0);
           })) {
        INFO(ranks << " ranks");
        CHECK(gradient == (saves ? 3 : 0));
        if (saves) CHECK(message.empty());
        if (!saves)
          CHECK_THAT(message, Contains("'weight' is still referenced outside its call") &&
                                  Contains("let a custom operation hold it in an autograd::Saved"));
      }
}

TEST_CASE("handles, names and shapes stay when a module is sharded", "[fsdp2-009]") {
  const World world = World::emulated(1, 3);
  nn::Llama model(tiny_llama());
  const auto before = model.named_parameters();
  const std::vector<Parameter> handles = model.parameters();
  for (nn::Module* part : model.parts()) fully_shard(*part, {.mesh = DeviceMesh::flat(world)});
  fully_shard(model, {.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  shard_plan(model);
  const auto after = model.named_parameters();
  REQUIRE(after.size() == before.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    INFO(before[i].first);
    CHECK(after[i].first == before[i].first);
    CHECK(after[i].second == handles[i]);
    const Shape whole = handles[i].shape();
    CHECK(whole == before[i].second.shape());
    CHECK(handles[i].shard().shape() == ShardSpec{whole, 3, 1}.local_shape());
  }
}

TEST_CASE("an optimizer made before sharding is the one made after", "[threads]") {
  for (const int ranks : {1, 3}) {
    const auto first = on_ranks(ranks, [](World& world) { return train(world, true); });
    const auto after = on_ranks(ranks, [](World& world) { return train(world, false); });
    for (int rank = 0; rank < ranks; ++rank)
      CHECK(
          same_bits(first[static_cast<std::size_t>(rank)], after[static_cast<std::size_t>(rank)]));
  }
}

TEST_CASE("a module that has values keeps them when it is sharded, and computes with them",
          "[threads][fsdp2-052][fsdp2-073]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 4}) {
    struct Pair {
      Values before, after;
      bool trains = false;
      std::vector<float> loss_before, loss_after;
    };
    const auto results = on_ranks(ranks, [&](World& world) {
      Stack model(kWidths);
      model.materialize(world.device());
      nn::init(model, {seed});
      Pair pair;
      for (const auto& [name, p] : model.named_parameters())
        pair.before[name] = p.shard().to_vector<float>();
      const Tensor x = rows_of(1, 0, 2, 5, world.device());
      pair.loss_before = mean_square(model(x)).to_vector<float>();
      model.shard({.mesh = DeviceMesh::flat(world)});
      pair.after = full_values(model);
      const Tensor loss = mean_square(model(x));
      pair.loss_after = loss.to_vector<float>();
      loss.backward();
      pair.trains = model.layers[0].weight.grad().defined();
      return pair;
    });
    for (const Pair& pair : results) {
      CHECK(pair.before.size() == 8);
      CHECK(same_bits(pair.before, pair.after));
      CHECK(same_bits(pair.loss_before, pair.loss_after));
      CHECK(pair.trains);
    }
  }
}

TEST_CASE("initial values are the same bits for any number of ranks, sharded or not",
          "[threads][fsdp2-015]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto values = [&](int ranks, bool sharded, bool llama) {
    const auto all = on_ranks(ranks, [&](World& world) {
      std::unique_ptr<nn::Module> model;
      const ShardOptions options{.mesh = DeviceMesh::flat(world)};
      if (llama) {
        auto made = std::make_unique<nn::Llama>(tiny_llama());
        if (sharded)
          for (nn::Module* part : made->parts()) fully_shard(*part, options);
        if (sharded) fully_shard(*made, options);
        model = std::move(made);
      } else {
        auto made = std::make_unique<Stack>(kWidths);
        if (sharded) made->shard(options);
        model = std::move(made);
      }
      model->materialize(world.device());
      nn::init(*model, {seed});
      return full_values(*model);
    });
    for (const Values& other : all) CHECK(same_bits(all[0], other));
    return all[0];
  };
  for (const bool llama : {false, true}) {
    const Values one = values(1, true, llama);
    CHECK(same_bits(one, values(1, false, llama)));
    for (const int ranks : {2, 3, 4, 5}) {
      INFO(ranks << " ranks");
      CHECK(same_bits(one, values(ranks, true, llama)));
    }
    double most = 0;
    for (const auto& [name, v] : one) most = std::max(most, largest(v));
    CHECK(most > 0);
  }
}

TEST_CASE("the host is at most `forwards_ahead` forwards ahead, though the program reads nothing",
          "[shard][threads]") {
  for (const bool is_root_called : {true, false})
    for (const int ahead : {1, 2, 5}) {
      INFO(ahead << (is_root_called ? " forwards ahead" : " calls of one unit ahead"));
      std::atomic<bool> is_open = false;
      std::atomic<int> begun = 0;
      const int calls = ahead + 3;
      std::thread host([&] {
        run_local(1, {.threads = 1}, [&](World& world) {
          Stack model(kWidths);
          model.shard({.mesh = DeviceMesh::flat(world), .forwards_ahead = ahead});
          model.materialize(world.device());
          nn::init(model, {3});
          nn::Module& called = is_root_called ? static_cast<nn::Module&>(model) : model.layers[0];
          called.register_forward_pre_hook([&](nn::Module&, nn::CallTensors) {
            if (++begun == 1)  // what the device has to end before anything else of this forward
              world.device().compute().launch({.name = "gate"},
                                              [&](Exec&) { is_open.wait(false); });
          });
          const Tensor x = rows_of(5, 0, 2, 5, world.device());
          if (!is_root_called) shard_plan(model);  // who the root is
          for (int call = 0; call < calls; ++call) is_root_called ? model(x) : model.layers[0](x);
        });
      });
      while (begun < ahead) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for one that goes further
      const int seen = begun;
      is_open = true;
      is_open.notify_all();
      host.join();
      CHECK(seen == ahead);
      CHECK(begun == calls);
    }
}
