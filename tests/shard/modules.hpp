// The models of the tests of sharding, each once. One that a single test needs for its very point
// stands beside that test.
#pragma once

#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::testing {

// See kRounding.
inline void make_positive(const nn::Module& module) {
  for (const Parameter& p : module.parameters())
    p.set_initializer(Initializer::normal(0.02, 0.0028));
}

inline constexpr Reshard kReshards[] = {Reshard::automatic, Reshard::always, Reshard::never};

// Each of these is a unit, made in this order.
inline void shard_each(std::initializer_list<nn::Module*> units, const ShardOptions& options) {
  for (nn::Module* const unit : units) fully_shard(*unit, options);
}
// The parts of a language model are units, and it is one itself.
template <class Model>
void shard_parts(Model& model, const ShardOptions& options) {
  for (nn::Module* const part : model.parts()) fully_shard(*part, options);
  fully_shard(model, options);
}
// Shards a model over all ranks, and gives it memory and values.
template <class Model>
void start(Model& model, const World& world, std::uint64_t seed,
           Reshard reshard = Reshard::automatic) {
  model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
  nn::init(model, {seed}, world.device());
}

// Linear layers, each with a tanh and a unit of its own, and a scale and an offset of the root's.
class Stack : public nn::Module {
 public:
  explicit Stack(const std::vector<std::int64_t>& widths)
      : scale({widths.back()}, Initializer::normal(1, 0.1)),
        offset({}, Initializer::normal(0.5, 0.1)) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      nn::Linear& layer = layers.emplace_back(widths[i], widths[i + 1]);
      layer.weight.set_initializer(Initializer::normal(0, 0.5));
      layer.bias.set_initializer(Initializer::normal(0, 0.5));
    }
    register_module("layers", layers);
    register_parameter("scale", scale);
    register_parameter("offset", offset);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = x;
      for (nn::Linear& layer : layers) {
        const auto body = [&layer](const Tensor& in) { return tanh(layer(in)); };
        h = recomputes ? recompute(body, h) : body(h);
      }
      return h * scale.value() + offset.value();
    });
  }
  void shard(const ShardOptions& options) {
    for (nn::Linear& layer : layers) fully_shard(layer, options);
    fully_shard(*this, options);
  }

  nn::ModuleList<nn::Linear> layers;
  Parameter scale, offset;
  bool recomputes = false;  // each layer, in backward
};

// Linear layers with tanh between them; the last one is the root's.
class Mlp : public nn::Module {
 public:
  explicit Mlp(const std::vector<std::int64_t>& widths) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i)
      layers.emplace_back(widths[i], widths[i + 1]);
    register_module("layers", layers);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& in) {
          Tensor h = in;
          for (std::size_t i = 0; i + 1 < layers.size(); ++i) {
            const auto body = [&layer = layers[i]](const Tensor& y) { return tanh(layer(y)); };
            h = recomputes ? recompute(body, h) : body(h);
          }
          return layers[layers.size() - 1](h);
        },
        x);
  }
  void shard(const ShardOptions& options) {
    for (std::size_t i = 0; i + 1 < layers.size(); ++i) fully_shard(layers[i], options);
    fully_shard(*this, options);
  }

  nn::ModuleList<nn::Linear> layers;
  bool recomputes = false;  // each layer but the last, in backward
};

// Layers that a forward calls in any order; the root's own parameter scales the result.
class Layers : public nn::Module {
 public:
  explicit Layers(int count = 5) : scale({6}, Initializer::normal(1, 0.1)) {
    for (int i = 0; i < count; ++i) layers.emplace_back(6, 6);
    register_module("layers", layers);
    register_parameter("scale", scale);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x, const std::vector<int>& order) {
    return call([&] {
      Tensor h = x;
      for (const int i : order) h = tanh(layers[static_cast<std::size_t>(i)](h));
      return h * scale.value();
    });
  }
  void shard(const ShardOptions& options) {
    for (nn::Linear& layer : layers) fully_shard(layer, options);
    fully_shard(*this, options);
  }

  nn::ModuleList<nn::Linear> layers;
  Parameter scale;
};

// A root with a parameter of its own and two layers, each a unit, and a body of the test's.
class Pair final : public nn::Module {
 public:
  using Body = std::function<Tensor(Pair&, const Tensor&)>;
  explicit Pair(Body f)
      : a(4, 4), b(4, 4), scale({4}, Initializer::normal(0, 0)), body(std::move(f)) {
    register_modules("a", a, "b", b);
    register_parameter("scale", scale);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return body(*this, x); });
  }
  void shard(const ShardOptions& options) { shard_each({&a, &b, this}, options); }

  nn::Linear a, b;
  Parameter scale;
  Body body;
};

// A unit with another one inside, in front of and behind which it has parameters of its own.
class NestedBlock final : public nn::Module {
 public:
  NestedBlock(std::int64_t width, std::int64_t middle)
      : pre(width, middle), inner(middle, middle), post(middle, width) {
    register_modules("pre", pre, "inner", inner, "post", post);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return post(tanh(inner(tanh(pre(x))))); });
  }
  void shard(const ShardOptions& options) { shard_each({&inner, this}, options); }

  nn::Linear pre, inner, post;
};

// Nested blocks in turn, which run again in backward where that is said.
class NestedBlocks final : public nn::Module {
 public:
  explicit NestedBlocks(int count, std::int64_t width = 4, bool again = false) : recomputes(again) {
    for (int i = 0; i < count; ++i) blocks.emplace_back(width, width + 1);
    register_module("blocks", blocks);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = x;
      for (NestedBlock& block : blocks)
        h = recomputes ? recompute([&block](const Tensor& in) { return block(in); }, h) : block(h);
      return h;
    });
  }
  void shard(const ShardOptions& options) {
    for (NestedBlock& block : blocks) block.shard(options);
    fully_shard(*this, options);
  }

  const bool recomputes;
  nn::ModuleList<NestedBlock> blocks;
};

// A table, which backward does not read, below a layer. Together they may run again in backward.
class Tabled final : public nn::Module {
 public:
  explicit Tabled(bool again = false) : recomputes(again) {
    register_modules("ids", ids, "layer", layer);
  }
  Tensor operator()(const Tensor& tokens) {
    const auto body = [this](const Tensor& in) { return layer(ids(in)); };
    return call([&] { return recomputes ? recompute(body, tokens) : body(tokens); });
  }
  void shard(const ShardOptions& options) { shard_each({&ids, &layer, this}, options); }

  nn::Embedding ids{6, 4};
  nn::Linear layer{4, 4};
  const bool recomputes;
};

// A layer and a head that have one weight, and a layer between them that is a unit. The first may
// be a table.
template <class First>
class Tied : public nn::Module {
 public:
  explicit Tied(std::int64_t width = 4)
      : first(width, width), middle(width, width), head(first.weight) {
    register_modules("first", first, "middle", middle, "head", head);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return head(tanh(middle(tanh(first(x))))); });
  }
  void shard(const ShardOptions& options) { shard_each({&middle, this}, options); }

  First first;
  nn::Linear middle, head;
};

// Adds a parameter, which backward need not read; whether it is gathered there is what it says.
class Shift final : public nn::Module {
 public:
  explicit Shift(std::int64_t width, bool is_read = true)
      : by({width}, Initializer::normal(0, 1)), is_read_(is_read) {
    register_parameter("by", by);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return x + by.value(); });
  }
  bool reads_parameters_in_backward() const override { return is_read_; }

  Parameter by;

 private:
  bool is_read_;
};

// Two matrices, and a tensor `extra` whose sum over all dimensions but the last scales the result.
class Scaled : public nn::Module {
 public:
  Scaled(std::int64_t in, std::int64_t middle, const Shape& extra)
      : up(in, middle),
        down(middle, extra[extra.ndim() - 1]),
        extra(extra, Initializer::normal(1, 0.1)) {
    register_modules("up", up, "down", down);
    register_parameter("extra", this->extra);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const auto below = [this](const Tensor& in) { return tanh(down(in)); };
      const Tensor h = tanh(up(x));
      Tensor by = extra.value();
      while (by.shape().ndim() > 1) by = sum(by, 0);
      return (is_recomputed ? recompute(below, h) : below(h)) * by;
    });
  }
  void shard(const ShardOptions& options) { shard_each({&up, &down, this}, options); }

  nn::Linear up, down;
  Parameter extra;
  bool is_recomputed = false;
};

// Two branches over a common stem, each a unit. `use` says whose output goes into the result; both
// are always called, since opening a unit is collective.
class Branches final : public nn::Module {
 public:
  Branches() : stem(5, 6), left(6, 6), right(6, 6), head(6, 3) {
    register_modules("stem", stem, "left", left, "right", right, "head", head);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x, bool use_left, bool use_right, bool recomputes = false) {
    const auto branch = [&](nn::Linear& layer, const Tensor& h) {
      if (!recomputes) return tanh(layer(h));
      return recompute([&layer](const Tensor& input) { return tanh(layer(input)); }, h);
    };
    return call([&] {
      const Tensor h = tanh(stem(x));
      const Tensor l = branch(left, h);
      const Tensor r = branch(right, h);
      Tensor sum = h;
      if (use_left) sum = sum + l;
      if (use_right) sum = sum + r;
      return head(sum);
    });
  }
  void shard(const ShardOptions& options) { shard_each({&stem, &left, &right, this}, options); }
  nn::Linear stem, left, right, head;
};

}  // namespace tessera::testing
