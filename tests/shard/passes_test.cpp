// Forward and backward passes beyond one of each: several forwards, forwards without backward,
// branches that some ranks or no rank reaches, and exceptions.
#include <stdexcept>

#include "tessera/autograd/recompute.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

Tensor inputs(const World& world, std::uint64_t seed, std::int64_t rows = 4) {
  return positive_rows(seed, world.rank() * rows, rows, 5, world.device());
}

// Two branches over a common stem, each a unit. `use` says whose output goes into the result; both
// are always called, since opening a unit is collective.
class Branches final : public nn::Module {
 public:
  Branches() : stem(5, 6), left(6, 6), right(6, 6), head(6, 3) {
    register_module("stem", stem);
    register_module("left", left);
    register_module("right", right);
    register_module("head", head);
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
  void shard(const ShardOptions& options) {
    fully_shard(stem, options);
    fully_shard(left, options);
    fully_shard(right, options);
    fully_shard(*this, options);
  }
  nn::Linear stem, left, right, head;
};

template <class Model>
struct Sharded {
  Sharded(World& world, Reshard reshard = Reshard::automatic) {
    model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
    model.materialize(world.device());
    nn::init(model, {77});
  }
  Model model;
};
class Plain final : public Stack {
 public:
  Plain() : Stack({5, 6, 6, 3}) { make_positive(*this); }
};

void drop_gradients(nn::Module& module) {
  for (const auto& part : parts_of(module.parameters())) part.group->gradient = {};
}

}  // namespace

TEST_CASE("a forward without backward changes nothing of the step after it",
          "[threads][fsdp2-097]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  enum class Before { nothing, evaluation, training, kept };
  for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never}) {
    const auto train = [&](Before before) {
      struct Result {
        Values values;
        ShardCounters counters;
        bool operator==(const Result& other) const { return same_bits(values, other.values); }
      };
      return on_ranks(3, [&](World& world) {
        Sharded<Plain> sharded(world, reshard);
        Plain& model = sharded.model;
        optim::AdamW optimizer(model.parameters(), {.lr = 0.02});
        Tensor kept;
        for (int step = 0; step < 3; ++step) {
          if (before == Before::evaluation) {
            const NoGradGuard no_grad;
            model(inputs(world, seed + 9));
          } else if (before == Before::training) {
            model(inputs(world, seed + 9));
          } else if (before == Before::kept) {
            kept = model(inputs(world, seed + 9));
          }
          mean_square(model(inputs(world, seed + static_cast<std::uint64_t>(step)))).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        return Result{full_values(model), shard_counters(model)};
      });
    };
    const auto plain = train(Before::nothing);
    for (const Before before : {Before::evaluation, Before::training, Before::kept}) {
      INFO("case " << static_cast<int>(before) << ", reshard " << reshard);
      const auto other = train(before);
      for (std::size_t rank = 0; rank < 3; ++rank) {
        CHECK(plain[rank] == other[rank]);
        // A peer's backward may reach a forward that is gone here, so it is gone back along, too;
        // the last one that is kept is not.
        const std::uint64_t expected = plain[rank].counters.reductions;
        const std::uint64_t more = before == Before::training ? expected
                                   : before == Before::kept   ? expected / 3 * 2
                                                              : 0;
        CHECK(other[rank].counters.reductions == expected + more);
      }
    }
  }
}

TEST_CASE("several forwards before their backwards give the sum of their gradients",
          "[threads][fsdp2-039]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  struct Result {
    Values gradients;
    std::uint64_t reductions = 0;
  };
  for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never})
    for (const int ranks : {1, 2}) {
      const auto train = [&](int way) {
        return on_ranks(ranks, [&](World& world) {
          Sharded<Plain> sharded(world, reshard);
          Plain& model = sharded.model;
          const Tensor x = inputs(world, seed), y = inputs(world, seed + 1);
          if (way == 0) {
            mean_square(model(x)).backward();
            mean_square(model(y)).backward();
          } else if (way == 1) {
            const Tensor first = mean_square(model(x)), second = mean_square(model(y));
            first.backward();
            second.backward();
          } else {
            const Tensor first = mean_square(model(x)), second = mean_square(model(y));
            (first + second).backward();
          }
          return Result{shard_gradients(model), shard_counters(model).reductions};
        });
      };
      const auto one_by_one = train(0);
      for (const int way : {1, 2}) {
        INFO(ranks << " ranks, way " << way << ", reshard " << reshard);
        const auto other = train(way);
        for (std::size_t rank = 0; rank < other.size(); ++rank) {
          CHECK(distance(one_by_one[rank].gradients, other[rank].gradients) < kRounding);
          CHECK(other[rank].reductions <= one_by_one[rank].reductions);
        }
      }
    }
}

TEST_CASE("micro-batches accumulate to the gradient of the whole batch", "[threads][fsdp2-088]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks, int micro_batches, DType wire) {
    std::vector<Values> shards = on_ranks(ranks, [&](World& world) {
      Plain model;
      ShardOptions options{.mesh = DeviceMesh::flat(world)};
      if (wire != f32) options.precision = {.param = wire};
      model.shard(options);
      model.materialize(world.device());
      nn::init(model, {77});
      const std::int64_t rows = 24 / ranks / micro_batches;
      for (int m = 0; m < micro_batches; ++m) {
        const std::int64_t first = world.rank() * (24 / ranks) + m * rows;
        const Tensor x = positive_rows(seed, first, rows, 5, world.device(), wire);
        (mean_square(model(x)) / micro_batches).backward();
      }
      return shard_gradients(model);
    });
    for (Values& shard : shards) shard.erase("offset");  // every rank has its one element
    return assemble(shards);
  };
  const Values whole = train(1, 1, f32);
  CHECK(whole.size() == 7);
  for (const int ranks : {1, 2, 3})
    for (const int micro_batches : {1, 2, 4}) {
      INFO(ranks << " ranks, " << micro_batches << " micro-batches");
      CHECK(distance(whole, train(ranks, micro_batches, f32)) < kRounding);
      // bf16 keeps 8 bits: one rounding is 2^-8 at most. An output has 17 of input, 3 * (weight,
      // product, bias, tanh), scale and offset; the derivative by it 4 more; its way back 2 of the
      // scale, 3 * 3 of layers, 0.25 * (13 + 9 + 5) of 1 - y^2; an activation 9; product, micro-
      // batches, ranks and means 9: 57 * 2^-8 < 0.25.
      const Values narrow = train(ranks, micro_batches, bf16);
      CHECK(distance(whole, narrow) < 0.25);
      CHECK(distance(whole, narrow) > 0);
    }
}

TEST_CASE("a branch that one rank does not use holds up nobody and counts as zeros",
          "[threads][fsdp2-098]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  struct Result {
    Values gradients;
    std::map<std::string, float> counts;
    ShardCounters counters;
  };
  // `lefts` and `rights`: whether rank r uses the branch.
  const auto train = [&](int ranks, Reshard reshard, bool recomputes,
                         const std::vector<bool>& lefts, const std::vector<bool>& rights) {
    return on_ranks(ranks, [&](World& world) {
      Sharded<Branches> sharded(world, reshard);
      const auto at = static_cast<std::size_t>(world.rank());
      mean_square(sharded.model(inputs(world, seed), lefts[at], rights[at], recomputes)).backward();
      return Result{shard_gradients(sharded.model), arrival_counts(sharded.model),
                    shard_counters(sharded.model)};
    });
  };
  for (const bool recomputes : {false, true})
    for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never}) {
      INFO("recomputes " << recomputes << ", reshard " << reshard);
      const std::vector<std::vector<bool>> cases[] = {{{true, true}, {true, false}},
                                                      {{false, true}, {true, false}},
                                                      {{true, false}, {false, false}}};
      for (const auto& c : cases) {
        const auto both = train(2, reshard, recomputes, c[0], c[1]);
        std::vector<Values> shards;
        for (const Result& result : both) {
          shards.push_back(result.gradients);
          CHECK(result.counters.gathers == both[0].counters.gathers);
          CHECK(result.counters.reductions == 4);
          CHECK(result.counts.at("stem.weight") == 2);
          CHECK(result.counts.at("left.weight") == static_cast<float>(c[0][0] + c[0][1]));
          CHECK(result.counts.at("right.bias") == static_cast<float>(c[1][0] + c[1][1]));
        }
        // The mean over two ranks of what each has alone.
        Values expected;
        for (int rank = 0; rank < 2; ++rank) {
          const auto at = static_cast<std::size_t>(rank);
          const auto alone = on_ranks(1, [&](World& world) {
            Sharded<Branches> sharded(world);
            const Tensor x = positive_rows(seed, rank * 4, 4, 5, world.device());
            mean_square(sharded.model(x, c[0][at], c[1][at])).backward();
            return shard_gradients(sharded.model);
          })[0];
          for (const auto& [name, p] : shards[0]) {
            auto& sum = expected[name];
            const auto found = alone.find(name);
            if (found == alone.end()) continue;
            sum.resize(found->second.size());
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += 0.5f * found->second[i];
          }
        }
        const Values whole = assemble(shards);
        for (auto& [name, values] : expected) values.resize(whole.at(name).size());
        CHECK(distance(expected, whole) < kRounding);
      }
    }
}

TEST_CASE("a parameter that no rank used is left alone by AdamW, weight decay included",
          "[threads][fsdp2-098]") {
  for (const int ranks : {1, 2, 3}) {
    struct Result {
      Values before, after, gradients;
      std::map<std::string, float> counts;
    };
    const auto results = on_ranks(ranks, [&](World& world) {
      Sharded<Branches> sharded(world);
      Branches& model = sharded.model;
      optim::AdamW optimizer(model.parameters(), {.lr = 0.1, .weight_decay = 0.5});
      Result result;
      result.before = full_values(model);
      mean_square(model(inputs(world, 3), true, false)).backward();
      result.counts = arrival_counts(model);
      result.gradients = shard_gradients(model);
      optimizer.step();
      result.after = full_values(model);
      return result;
    });
    for (const Result& r : results) {
      CHECK(same_bits(r.before.at("right.weight"), r.after.at("right.weight")));
      CHECK(same_bits(r.before.at("right.bias"), r.after.at("right.bias")));
      CHECK(!same_bits(r.before.at("left.weight"), r.after.at("left.weight")));
      // Zeros on several ranks, none on one.
      CHECK(r.counts.at("right.weight") == (ranks == 1 ? -1 : 0));
      CHECK(r.gradients.contains("right.weight") == (ranks > 1));
      if (ranks > 1) CHECK(largest(r.gradients.at("right.weight")) == 0);
      CHECK(largest(r.gradients.at("left.weight")) > 0);
    }
  }
}

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
    void shard(const ShardOptions& options) {
      fully_shard(a, options);
      fully_shard(b, options);
      fully_shard(c, options);
      fully_shard(*this, options);
    }
    nn::Linear a, b, c;
  };
  struct Result {
    Values gradients;
    std::string message;
    std::int64_t slots_taken = 0;
  };
  for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never})
    for (const int ranks : {1, 2}) {
      const auto train = [&](int breaks) {
        return on_ranks(ranks, [&](World& world) {
          Sharded<Breakable> sharded(world, reshard);
          Breakable& model = sharded.model;
          Result result;
          if (breaks > 0) try {
              mean_square(model(inputs(world, seed + 1), breaks)).backward();
            } catch (const std::runtime_error& error) {
              result.message = error.what();
            }
          drop_gradients(model);
          mean_square(model(inputs(world, seed), 0)).backward();
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

TEST_CASE("ranks that call different units of one size are told so by name", "[threads]") {
  std::vector<std::string> messages(2);
  CHECK_THROWS_AS(run_checked(2, {.threads = 1},
                              [&](World& world) {
                                Sharded<Branches> sharded(world);
                                Branches& model = sharded.model;
                                try {
                                  model.call([&] {
                                    const Tensor h = model.stem(inputs(world, 1));
                                    return world.rank() == 0 ? model.left(h) : model.right(h);
                                  });
                                  world.device().synchronize();
                                } catch (const CommError& error) {
                                  messages[static_cast<std::size_t>(world.rank())] = error.what();
                                  throw;
                                }
                              }),
                  CommError);
  for (const std::string& message : messages)
    CHECK_THAT(message, Contains("all_gather left") && Contains("all_gather right"));
}
