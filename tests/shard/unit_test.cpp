// What a sharded module computes, in every way to own parameters and to call modules: the gradients
// of any number of ranks are those of one, within kRounding.
#include "tessera/autograd/recompute.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

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
    start(model, world, seed, reshard);
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
    for (const Reshard reshard : kReshards) {
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
  struct Rows final : Mlp {
    Rows() : Mlp({5, 7, 1, 3}) { make_positive(*this); }
  };
  check_as_one_rank<Rows>(6, [](Rows& model, const Tensor& x) { backward(model(x)); });
}

TEST_CASE("a parameter of no dimension is one element on every rank", "[threads][fsdp2-010]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks) {
    return on_ranks(ranks, [&](World& world) {
      Uneven model;
      start(model, world, seed);
      optim::SGD sgd(model.parameters(),
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
  struct Frozen final : Mlp {
    Frozen() : Mlp({5, 6, 6, 3}) {
      make_positive(*this);
      layers[0].weight.freeze();  // part of a unit
      layers[1].freeze();         // all of a unit
    }
  };
  check_as_one_rank<Frozen>(3, [](Frozen& model, const Tensor& x) { backward(model(x)); });

  struct Bytes {
    std::int64_t weights = 0, gradients = 0, moments = 0;
    bool unchanged = false, trained = false;
  };
  const auto results = on_ranks(2, [](World& world) {
    Frozen model;
    start(model, world, 1);
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
    out.unchanged = same("layers.0.weight") && same("layers.1.weight") && same("layers.1.bias");
    out.trained = !same("layers.0.bias") && !same("layers.2.weight") && !same("layers.2.bias");
    return out;
  });
  for (const Bytes& bytes : results) {
    CHECK(bytes.unchanged);
    CHECK(bytes.trained);
    // Shards on two ranks, each rounded up to 64 elements: weights of 15, 18 and 9 or 12, biases of
    // 3, 3 and 2 take 64 each; a gradient has 64 arrival counts behind it.
    CHECK(bytes.weights == 6 * 256);
    CHECK(bytes.moments == 2 * 3 * 256);
    CHECK(bytes.gradients == (64 + 64) * 4 + (128 + 64) * 4);
  }
}

TEST_CASE("a weight that two layers share has one gradient, the sum of both uses",
          "[threads][fsdp2-042]") {
  struct TiedLayers final : Tied<nn::Linear> {
    TiedLayers() : Tied(5) { make_positive(*this); }
  };
  check_as_one_rank<TiedLayers>(4, [](TiedLayers& model, const Tensor& x) { backward(model(x)); });
}

TEST_CASE("a unit may have no parameter, or units inside it, or be called twice",
          "[threads][fsdp2-035][fsdp2-073]") {
  class Nested final : public nn::Module {
   public:
    class Squash final : public nn::Module {
     public:
      Tensor operator()(const Tensor& x) {
        return call([&] { return tanh(x); });
      }
    };
    Nested() {
      register_modules("first", first, "squash", squash, "last", last);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return last(squash(first(squash(first(x))))); });
    }
    void shard(const ShardOptions& options) {
      first.shard(options);
      last.shard(options);
      shard_each({&squash, this}, options);
    }
    NestedBlock first{5, 6}, last{5, 6};
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
    void shard(const ShardOptions& options) { shard_each({&a, &b, this}, options); }
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
  struct Tower final : Mlp {
    Tower() : Mlp({5, 5, 5, 5, 5, 5, 5, 3}) {
      make_positive(*this);
      recomputes = true;
      for (std::size_t i = 0; i < 6; ++i) layers[i].freeze();
    }
  };
  check_as_one_rank<Tower>(2, [](Tower& model, const Tensor& x) { backward(model(x)); });
}

namespace {

// Recomputed blocks with a condition that a unit outside of them has made.
class Conditioned final : public nn::Module {
 public:
  explicit Conditioned(bool recomputes) : stem(5, 6), condition(5, 6), recomputes(recomputes) {
    for (int i = 0; i < 2; ++i) blocks.emplace_back(6, 6);
    register_modules("stem", stem, "condition", condition, "blocks", blocks);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = tanh(stem(x));
      const Tensor given = tanh(condition(x));
      for (nn::Linear& block : blocks) {
        const auto f = [&block, given](const Tensor& t) { return tanh(block(t * given)); };
        h = recomputes ? recompute(f, h) : f(h);
      }
      return h;
    });
  }
  void shard(const ShardOptions& options) {
    for (nn::Linear* const layer : {&stem, &condition, &blocks[0], &blocks[1]})
      fully_shard(*layer, options);
    fully_shard(*this, options);
  }
  nn::Linear stem, condition;
  nn::ModuleList<nn::Linear> blocks;
  const bool recomputes;
};

}  // namespace

TEST_CASE("recomputed blocks give what they have captured of another unit its gradient",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](int ranks, bool recomputes, Reshard reshard) {
    return on_ranks(ranks, [&](World& world) {
      Conditioned model(recomputes);
      start(model, world, 77, reshard);
      mean_square(model(own_rows(world, seed))).backward();
      return shard_gradients(model);
    });
  };
  for (const int ranks : {1, 2})
    for (const Reshard reshard : kReshards) {
      CAPTURE(ranks, reshard);
      const auto expected = run(ranks, false, reshard), found = run(ranks, true, reshard);
      for (std::size_t rank = 0; rank < found.size(); ++rank)
        CHECK(same_bits(expected[rank], found[rank]));
    }
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
