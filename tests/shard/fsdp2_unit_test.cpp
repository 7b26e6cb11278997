// FSDP2's tests of training: programs of users, on several ranks and with every policy, against the
// same program on one rank and on a model without units.
#include <map>
#include <tuple>
#include <vector>

#include "tessera/autograd/recompute.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/programs.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// ThreeLayers of a stack, each a unit below the root.
struct ThreeLayers : Program {
  ThreeLayers() : ThreeLayers(3) {}
  explicit ThreeLayers(int count) {
    for (int i = 0; i < count; ++i) layers.emplace_back(5, 5);
    register_module("layers", layers);
  }
  void shard(const ShardOptions& options) override {
    for (nn::Linear& layer : layers) fully_shard(layer, options);
    fully_shard(*this, options);
  }
  Tensor forward(const Tensor& x, std::size_t used = 3) {
    return call([&] {
      Tensor h = x;
      for (std::size_t i = 0; i < used; ++i) h = tanh(layers[i](h));
      return h;
    });
  }
  Tensor backward(const Tensor& loss) {
    loss.backward();
    return loss.detach();
  }
  nn::ModuleList<nn::Linear> layers;
};

// Products of 17 terms, rounded 18 times on either way; a ReLU of what is positive rounds nothing.
// Two of them are fewer roundings than kRounding has.
template <std::int64_t kIn, std::int64_t kMiddle, std::int64_t kOut>
struct OneUnit final : Program {
  OneUnit() { register_modules("first", first, "second", second); }
  void shard(const ShardOptions& options) override { fully_shard(*this, options); }
  std::int64_t width() const override { return kIn; }
  Tensor step(const World&, const Tensor& x, int) override {
    const Tensor loss = mean_square(call([&] { return second(relu(first(x))); }));
    loss.backward();
    return loss.detach();
  }
  nn::Linear first{kIn, kMiddle}, second{kMiddle, kOut};
};

}  // namespace

TEST_CASE("linear layers of any size in one unit", "[threads][fsdp2-030][fsdp2-083]") {
  check_program<OneUnit<16, 15, 8>>();
  check_program<OneUnit<7, 15, 3>>();
  check_program<OneUnit<16, 17, 8>>();
}

TEST_CASE("a unit is called on its own after a step of the whole", "[threads][fsdp2-034]") {
  struct Partly final : ThreeLayers {
    Tensor step(const World&, const Tensor& x, int k) override {
      return backward(mean_square(k % 2 == 0 ? forward(x) : layers[0](x)));
    }
  };
  check_program<Partly>();
}

TEST_CASE("two forwards of nested units that run again, and one loss over both",
          "[threads][fsdp2-039]") {
  struct Twice final : Program {
    Twice() { register_module("both", both); }
    void shard(const ShardOptions& options) override { both.shard(options); }
    Tensor step(const World&, const Tensor& x, int) override {
      const Tensor loss = mean_square(both(part_of(x, 0, 2))) + mean_square(both(part_of(x, 1, 2)));
      loss.backward();
      return loss.detach();
    }
    NestedBlocks both{2, 5, true};
  };
  check_program<Twice>();
}

TEST_CASE("a tied table of 4 N + 1 rows: every row is trained", "[threads][fsdp2-042]") {
  struct Tied final : Program {
    Tied() : table(17, 5), out(table.weight) { register_modules("table", table, "out", out); }
    void shard(const ShardOptions& options) override { fully_shard(*this, options); }
    Tensor step(const World& world, const Tensor&, int) override {
      const Tensor loss = mean_square(call([&] {
        const auto body = [&](const Tensor& ids) { return out(tanh(table(ids))); };
        return recompute(body, Tensor::arange(17, i64, world.device()));
      }));
      loss.backward();
      return loss.detach();
    }
    nn::Embedding table;
    nn::Linear out;
  };
  check_program<Tied>();
  const World nowhere = World::single();
  const ShardOptions options{.mesh = DeviceMesh::flat(nowhere)};
  const Course course = train_program<Tied>(4, &options, 1);
  for (const float g : course.gradients.at("table.weight")) CHECK(g > 0);
}

TEST_CASE("micro-batches whose forwards run ahead of their backwards, as in 1F1B",
          "[threads][fsdp2-045]") {
  struct Pipelined : ThreeLayers {
    Tensor step(const World&, const Tensor& x, int) override {
      const auto loss = [&](int part) { return mean_square(forward(part_of(x, part, 3))) / 3; };
      const Tensor first = loss(0), second = loss(1);
      reduce(false);
      first.backward();
      const Tensor third = loss(2);
      second.backward();
      reduce(true);
      third.backward();
      return (first + second + third).detach();
    }
    virtual void reduce(bool) {}
  };
  // The gathers of all units are queued before anything else, and the last part reduces for all.
  struct Unsharded final : Pipelined {
    Tensor step(const World& world, const Tensor& x, int k) override {
      if (hook()) shard_plan(*this);
      for (nn::Linear& layer : layers)
        if (layer.hook()) unshard(layer);
      return Pipelined::step(world, x, k);
    }
    void reduce(bool reduces) override {
      if (hook()) set_requires_gradient_sync(*this, reduces);
    }
  };
  check_program<Pipelined>();
  check_program<Unsharded>();
}

TEST_CASE("methods of one unit that are called apart", "[threads][fsdp2-050]") {
  struct Coder final : ThreeLayers {
    Coder() : ThreeLayers(2) {}
    Tensor encode(const Tensor& x) {
      return call([&] { return tanh(layers[0](x)); });
    }
    Tensor decode(const Tensor& h) {
      return call([&] { return tanh(layers[1](h)); });
    }
    Tensor step(const World&, const Tensor& x, int) override {
      return backward(mean_square(decode(encode(x))));
    }
    void shard(const ShardOptions& options) override { fully_shard(*this, options); }
  };
  check_program<Coder>();
}

TEST_CASE("three roots one after another", "[threads][fsdp2-051]") {
  struct Roots final : ThreeLayers {
    void shard(const ShardOptions& options) override {
      for (nn::Linear& layer : layers) fully_shard(layer, options);
    }
    Tensor step(const World&, const Tensor& x, int) override {
      return backward(mean_square(layers[2](tanh(layers[1](tanh(layers[0](x)))))));
    }
  };
  check_program<Roots>();
}

TEST_CASE("two forwards of a part of a model, whose head has no gradient", "[threads][fsdp2-058]") {
  struct Headless final : ThreeLayers {
    void shard(const ShardOptions& options) override {
      fully_shard({&layers[0], &layers[1]}, options);
      fully_shard({&layers[2]}, options);
      fully_shard(*this, options);
    }
    Tensor step(const World&, const Tensor& x, int) override {
      const Tensor a = forward(part_of(x, 0, 2), 2), b = forward(part_of(x, 1, 2), 2);
      const Tensor loss = backward((mean_square(a) + mean_square(b)) / 2);
      if (layers[2].weight.unit() && layers[2].weight.grad().defined())
        throw std::logic_error("a head without calls");
      return loss;
    }
  };
  check_program<Headless>();
}

TEST_CASE("a sum over ranks by hand beside the gather of a unit that is opened ahead",
          "[threads][fsdp2-072]") {
  struct Normed final : ThreeLayers {
    Tensor step(const World& world, const Tensor& x, int) override {
      return backward(mean_square(call([&] {
        const Tensor h = tanh(layers[0](x));
        if (layers[1].hook()) unshard(layers[1]);
        const Tensor mine = mean(h.detach());
        const Tensor all = dist::all_reduce(mine, world) / world.size();
        return tanh(layers[2](tanh(layers[1](h)) / (all + 1)));
      })));
    }
  };
  check_program<Normed>();
}

TEST_CASE("a module without inputs trains, and one with inputs of elsewhere says so",
          "[threads][fsdp2-026]") {
  struct Alone final : ThreeLayers {
    Tensor step(const World& world, const Tensor&, int) override {
      return backward(mean_square(forward(Tensor::ones({3, 5}, f32, world.device()))));
    }
  };
  check_program<Alone>();
  const World world = World::single();
  Alone model;
  start(model, world, 1);
  CHECK_THAT(thrown_by([&] { model.forward(Tensor::ones({3, 5}, f32, Device::cpu())); }),
             Contains("device"));
}

TEST_CASE("an output that the loss leaves out from some step on, and a layer that none uses",
          "[threads][fsdp2-098]") {
  struct Leaves final : ThreeLayers {
    Tensor step(const World&, const Tensor& x, int k) override {
      const auto [a, b] = call([&] {
        const Tensor h = tanh(layers[0](x));
        return std::pair(h, tanh(layers[1](h)));
      });
      return backward(k < 2 ? mean_square(a) + mean_square(b) : mean_square(a));
    }
  };
  check_program<Leaves>();
}

namespace {

struct Box {
  Tensor h;
  std::vector<Tensor> rest;
};
template <class F>
void for_each_tensor(Box& box, const F& f) {
  f(box.h);
  for (Tensor& t : box.rest) f(t);
}

}  // namespace

TEST_CASE("inputs and outputs in vectors, pairs, tuples, optionals and types of one's own",
          "[threads][fsdp2-089][fsdp2-099]") {
  struct Boxes final : ThreeLayers {
    Tensor step(const World&, const Tensor& x, int) override {
      const auto pair = layers[0].call(
          [&](const std::vector<Tensor>& in) {
            return std::pair(tanh(linear(in[0], layers[0].weight, layers[0].bias)), in[1]);
          },
          std::vector<Tensor>{x, x});
      const auto [y, none] = layers[1].call(
          [&](const std::tuple<Tensor, Tensor>& in, const std::optional<Tensor>& extra) {
            return std::tuple(tanh(linear(std::get<0>(in), layers[1].weight, layers[1].bias)),
                              extra);
          },
          std::tuple(pair.first, pair.second), std::optional<Tensor>());
      const Box box = layers[2].call(
          [&](const Box& in) {
            return Box{linear(in.h, layers[2].weight, layers[2].bias), {in.h}};
          },
          Box{y, {}});
      return backward(mean_square(box.h) + mean_square(box.rest[0]));
    }
  };
  check_program<Boxes>();
}
