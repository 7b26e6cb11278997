// What a sharded module computes, in every way to own parameters and to call modules: the gradients
// of any number of ranks are those of one, within kRounding.
#include "tessera/autograd/recompute.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::int64_t kRows = 12;

struct Outcome {
  Values gradients, parameters;
};

// What `step(model, x)` leaves, x being all of the rows in one rank's or a share in many ranks'.
template <class Model, class F>
Outcome run(int ranks, Reshard reshard, std::uint64_t seed, const F& step) {
  struct Mine {
    Values gradients, parameters;
  };
  const auto mine = on_ranks(ranks, [&](World& world) {
    Model model;
    model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
    model.materialize(world.device());
    nn::init(model, {seed});
    const std::int64_t rows = kRows / ranks;
    step(model, positive_rows(seed, world.rank() * rows, rows, 5, world.device()));
    return Mine{shard_gradients(model), full_values(model)};
  });
  std::vector<Values> shards;
  for (const Mine& m : mine) shards.push_back(m.gradients);
  return {assemble(shards), mine[0].parameters};
}

template <class Model, class F>
void check_as_one_rank(std::size_t gradients, const F& step) {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Outcome one = run<Model>(1, Reshard::automatic, seed, step);
  CHECK(one.gradients.size() == gradients);
  for (const int ranks : {2, 3, 4})
    for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never}) {
      INFO(ranks << " ranks, reshard " << reshard);
      const Outcome many = run<Model>(ranks, reshard, seed, step);
      CHECK(distance(one.gradients, many.gradients) < kRounding);
      CHECK(distance(one.parameters, many.parameters) < kRounding);
    }
}

void backward(const Tensor& y) { mean_square(y).backward(); }

// Rows that do not divide: 7 = 2 + 2 + 2 + 1 over four ranks, 1 = 1 + 0 + 0 + 0. No 0-dim
// parameter: of these every rank shows the same element.
class Uneven : public Stack {
 public:
  Uneven() : Stack({5, 7, 1, 3}) { make_positive(*this); }
};

}  // namespace

TEST_CASE("uneven and empty shards have the gradients of one rank", "[threads]") {
  class Rows final : public nn::Module {
   public:
    Rows() : a(5, 7), b(7, 1), c(1, 3) {
      register_module("a", a);
      register_module("b", b);
      register_module("c", c);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return c(tanh(b(tanh(a(x))))); });
    }
    void shard(const ShardOptions& options) {
      fully_shard(a, options);
      fully_shard(b, options);
      fully_shard(*this, options);  // owns c
    }
    nn::Linear a, b, c;
  };
  check_as_one_rank<Rows>(6, [](Rows& model, const Tensor& x) { backward(model(x)); });
}

TEST_CASE("a model that nobody has initialised is zero, on any number of ranks", "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    const auto sums = on_ranks(ranks, [](World& world) {
      nn::Linear layer(4, 6);
      fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
      layer.materialize(world.device());
      return sum(layer(Tensor::ones({3, 4}, f32, world.device()))).item();
    });
    CHECK(sums == std::vector<double>(static_cast<std::size_t>(ranks), 0));
  }
}

TEST_CASE("a parameter of no dimension is one element on every rank", "[threads][fsdp2-010]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks) {
    return on_ranks(ranks, [&](World& world) {
      Uneven model;
      model.shard({.mesh = DeviceMesh::flat(world)});
      model.materialize(world.device());
      nn::init(model, {seed});
      optim::Sgd sgd(model.parameters(),
                     {.lr = 0.01});  // 0.02 of a parameter at most: none cancels
      const std::int64_t rows = kRows / ranks;
      backward(model(positive_rows(seed, world.rank() * rows, rows, 5, world.device())));
      sgd.step();
      return full_values(model);
    });
  };
  const Values one = train(1)[0];
  for (const int ranks : {2, 3})
    for (const Values& values : train(ranks)) CHECK(distance(one, values) < kRounding);
}

TEST_CASE("frozen parameters are used, never changed, and hold no state", "[threads]") {
  class Frozen final : public nn::Module {
   public:
    Frozen() : a(5, 6), b(6, 6), c(6, 3) {
      register_module("a", a);
      register_module("b", b);
      register_module("c", c);
      make_positive(*this);
      a.weight.freeze();  // part of a unit
      b.weight.freeze();  // all of a unit
      b.bias.freeze();
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return c(tanh(b(tanh(a(x))))); });
    }
    void shard(const ShardOptions& options) {
      fully_shard(a, options);
      fully_shard(b, options);
      fully_shard(*this, options);
    }
    nn::Linear a, b, c;
  };
  check_as_one_rank<Frozen>(3, [](Frozen& model, const Tensor& x) { backward(model(x)); });

  struct Bytes {
    std::int64_t weights = 0, gradients = 0, moments = 0;
    bool unchanged = false, trained = false;
  };
  const auto results = on_ranks(2, [](World& world) {
    Frozen model;
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    optim::AdamW optimizer(model.parameters(), {.lr = 0.1, .weight_decay = 0.1});
    optimizer.prepare();
    const Values before = full_values(model);
    backward(model(rows_of(1, world.rank() * 4, 4, 5, world.device())));
    const Ledger& ledger = Memory::of(world.device()).ledger();
    const Bytes bytes{ledger.live_bytes("weights"), ledger.live_bytes("gradients"),
                      ledger.live_bytes("moments")};
    optimizer.step();
    const Values after = full_values(model);
    const auto same = [&](const char* name) { return same_bits(before.at(name), after.at(name)); };
    Bytes out = bytes;
    out.unchanged = same("a.weight") && same("b.weight") && same("b.bias");
    out.trained = !same("a.bias") && !same("c.weight") && !same("c.bias");
    return out;
  });
  for (const Bytes& bytes : results) {
    CHECK(bytes.unchanged);
    CHECK(bytes.trained);
    // Shards on two ranks, each rounded up to 64 elements: a.weight 15, a.bias 3, b.weight 18,
    // b.bias 3, c.weight 9 or 12, c.bias 2 take 64 each; a gradient has 64 arrival counts behind
    // it.
    CHECK(bytes.weights == 6 * 256);
    CHECK(bytes.moments == 2 * 3 * 256);
    CHECK(bytes.gradients == (64 + 64) * 4 + (128 + 64) * 4);
  }
}

TEST_CASE("a weight that two layers share has one gradient, the sum of both uses",
          "[threads][fsdp2-042]") {
  class Tied final : public nn::Module {
   public:
    Tied() : up(5, 5), down(up.weight), middle(5, 5) {
      register_module("up", up);
      register_module("middle", middle);
      register_module("down", down);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return down(tanh(middle(tanh(up(x))))); });
    }
    void shard(const ShardOptions& options) {
      fully_shard(middle, options);
      fully_shard(*this, options);
    }
    nn::Linear up, down, middle;
  };
  check_as_one_rank<Tied>(4, [](Tied& model, const Tensor& x) { backward(model(x)); });
}

TEST_CASE("a unit may have no parameter, or units inside it, or be called twice",
          "[threads][fsdp2-035][fsdp2-073]") {
  class Inner final : public nn::Module {
   public:
    Inner() : pre(5, 6), deep(6, 6), post(6, 5) {
      register_module("pre", pre);
      register_module("deep", deep);
      register_module("post", post);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return post(tanh(deep(tanh(pre(x))))); });
    }
    nn::Linear pre, deep, post;
  };
  class Nested final : public nn::Module {
   public:
    class Squash final : public nn::Module {
     public:
      Tensor operator()(const Tensor& x) {
        return call([&] { return tanh(x); });
      }
    };
    Nested() {
      register_module("first", first);
      register_module("squash", squash);
      register_module("last", last);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return last(squash(first(squash(first(x))))); });
    }
    void shard(const ShardOptions& options) {
      fully_shard(first.deep, options);
      fully_shard(first, options);
      fully_shard(squash, options);
      fully_shard(last.deep, options);
      fully_shard(last, options);
      fully_shard(*this, options);
    }
    Inner first, last;
    Squash squash;
  };
  check_as_one_rank<Nested>(12, [](Nested& model, const Tensor& x) { backward(model(x)); });
}

TEST_CASE("recomputed blocks have the gradients of those that are kept", "[threads][fsdp2-038]") {
  class Kept : public nn::Module {
   public:
    explicit Kept(bool again = false) : recomputes(again), a(5, 6), b(6, 5), c(5, 3) {
      register_module("a", a);
      register_module("b", b);
      register_module("c", c);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      const auto pair = [this](const Tensor& h) { return tanh(b(tanh(a(h)))); };
      return call([&] {
        Tensor h = recomputes ? recompute(pair, x) : pair(x);
        h = recomputes ? recompute(pair, h) : pair(h);  // the same units once more
        return c(h);
      });
    }
    void shard(const ShardOptions& options) {
      fully_shard(a, options);
      fully_shard(b, options);
      fully_shard(*this, options);
    }
    bool recomputes;
    nn::Linear a, b, c;
  };
  class Again final : public Kept {
   public:
    Again() : Kept(true) {}
  };
  const auto step = [](Kept& model, const Tensor& x) { backward(model(x)); };
  check_as_one_rank<Again>(6, step);
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 3})
    for (const Reshard reshard : {Reshard::automatic, Reshard::never})
      CHECK(same_bits(run<Kept>(ranks, reshard, seed, step).gradients,
                      run<Again>(ranks, reshard, seed, step).gradients));
}

TEST_CASE("many frozen blocks that are recomputed leave no unit open", "[threads]") {
  class Tower final : public nn::Module {
   public:
    Tower() : head(5, 3) {
      for (int i = 0; i < 6; ++i) {
        nn::Linear& layer = layers.emplace_back(5, 5);
        layer.weight.freeze();
        layer.bias.freeze();
      }
      register_module("layers", layers);
      register_module("head", head);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] {
        Tensor h = x;
        for (nn::Linear& layer : layers)
          h = recompute([&layer](const Tensor& input) { return tanh(layer(input)); }, h);
        return head(h);
      });
    }
    void shard(const ShardOptions& options) {
      for (nn::Linear& layer : layers) fully_shard(layer, options);
      fully_shard(*this, options);
    }
    nn::ModuleList<nn::Linear> layers;
    nn::Linear head;
  };
  check_as_one_rank<Tower>(2, [](Tower& model, const Tensor& x) { backward(model(x)); });
}
