// The step after an exception in a call or in backward is as if it had not been, with or without a
// reset.
#include <initializer_list>
#include <stdexcept>

#include "tessera/autograd/recompute.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

void drop_gradients(nn::Module& module) {
  for (const auto& part : parts_of(module.parameters())) part.group->gradient = {};
}

}  // namespace

TEST_CASE("after an exception in a call the next step is as if it had not been",
          "[threads][fsdp2-057]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  // Throws within the call of a unit, of the root, or in backward, on all ranks alike.
  class Breakable final : public nn::Module {
   public:
    Breakable() : a(5, 6), b(6, 6), c(6, 3) {
      register_module("a", a);
      register_module("b", b);
      register_module("c", c);
      make_positive(*this);
    }
    Tensor operator()(const Tensor& x, int breaks) {
      return call([&] {
        Tensor h = tanh(a(x));
        h = b.call([&] {
          const Tensor y = tanh(linear(h, b.weight, b.bias));
          if (breaks == 1) throw std::runtime_error("inside a unit");
          return y;
        });
        if (breaks == 2) throw std::runtime_error("inside the root");
        h = autograd::record("breaks", {h}, h.detach(),
                             [breaks](const Tensor& g, autograd::Gradients& out) {
                               if (breaks == 3) throw std::runtime_error("in backward");
                               out.set(0, g);
                             });
        return c(h);
      });
    }
    void shard(const ShardOptions& options) { shard_each({&a, &b, &c, this}, options); }
    nn::Linear a, b, c;
  };
  struct Result {
    Values gradients;
    std::string message;
    std::int64_t slots_taken = 0;
  };
  for (const Reshard reshard : kReshards)
    for (const int ranks : {1, 2}) {
      const auto train = [&](int breaks) {
        return on_ranks(ranks, [&](World& world) {
          Breakable model;
          start(model, world, 77, reshard);
          Result result;
          if (breaks > 0) try {
              mean_square(model(own_rows(world, seed + 1), breaks)).backward();
            } catch (const std::runtime_error& error) {
              result.message = error.what();
            }
          drop_gradients(model);
          mean_square(model(own_rows(world, seed), 0)).backward();
          result.gradients = shard_gradients(model);
          const Ledger& ledger = Memory::of(world.device()).ledger();
          result.slots_taken =
              ledger.live_bytes("gather slots") + ledger.live_bytes("gradient slots");
          return result;
        });
      };
      const auto whole = train(0);
      for (const int breaks : {1, 2, 3}) {
        INFO(ranks << " ranks, case " << breaks << ", reshard " << reshard);
        const auto after = train(breaks);
        for (std::size_t rank = 0; rank < after.size(); ++rank) {
          CHECK_THAT(after[rank].message, Contains("in"));
          CHECK(same_bits(whole[rank].gradients, after[rank].gradients));
          CHECK(after[rank].slots_taken == 0);
        }
      }
    }
}

// What the function holds back reads the inner unit's scale, and is submitted by the outer one.
TEST_CASE("an exception in the second run of a recomputed function leaves open what it may read") {
  class Throws final : public nn::Module {
   public:
    Throws() {
      register_parameter("weight", weight);
      register_parameter("scale", scale);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] {
        const Tensor y = tanh(linear(x, weight.value())) * scale.value();
        if (--runs_left == 0) throw std::runtime_error("in the second run");
        return tanh(y);
      });
    }
    int runs_left = 0;
    Parameter weight{{4, 4}, Initializer::normal(0, 0.5)}, scale{{}, Initializer::normal(1, 0.1)};
  };
  class Outer final : public nn::Module {
   public:
    Outer() {
      register_module("inner", inner);
      register_parameter("weight", weight);
      register_parameter("scale", scale);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] {
        const Tensor h = linear(x, weight.value()) * scale.value();
        return linear(h + inner(h), weight.value());
      });
    }
    Throws inner;
    Parameter weight{{4, 4}, Initializer::normal(0, 0.5)}, scale{{4}, Initializer::normal(1, 0.1)};
  };
  class Root final : public nn::Module {
   public:
    Root() {
      register_module("outer", outer);
      register_parameter("weight", weight);
    }
    Tensor operator()(const Tensor& x, int products) {
      return call([&] {
        const auto f = [this](const Tensor& t) { return outer(t); };
        return recompute(f, linear(x, weight.value()), Keep{.products = products});
      });
    }
    Outer outer;
    Parameter weight{{4, 4}, Initializer::normal(0, 0.5)};
  };
  for (const int products : {0, 1, 2})
    for (const Reshard reshard : kReshards) {
      CAPTURE(products, reshard);
      const auto train = [&](bool fails) {
        return on_ranks(2, [&](World& world) {  // a race fails this, too
          Root model;
          const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                     .reshard_after_forward = reshard};
          shard_each({&model.outer.inner, &model.outer, &model}, options);
          nn::init(model, {7}, world.device());
          const auto step = [&](int runs_left) {
            model.outer.inner.runs_left = world.rank() == 1 ? runs_left : 0;
            mean_square(model(rows_of(3, world.rank(), 3, 4, world.device()), products)).backward();
            world.device().synchronize();
          };
          if (fails) {
            try {
              step(2);
            } catch (const std::exception&) {
              reset(model);
            }
          }
          step(0);
          return shard_gradients(model);
        });
      };
      const auto expected = train(false), found = train(true);
      for (std::size_t rank = 0; rank < 2; ++rank) CHECK(same_bits(expected[rank], found[rank]));
    }
}
