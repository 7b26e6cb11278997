// One order of collectives on every rank, whatever a rank's graph reaches: branches, calls and
// forwards that some ranks do not use, and programs that make calls where there were none.
#include <functional>
#include <limits>

#include "tessera/autograd/recompute.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/pair.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a branch that one rank does not use, beside a parameter of the root", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int rank) -> Pair::Body {
          return [rank](Pair& m, const Tensor& x) {
            const Tensor y = m.a(x), h = rank == 0 ? x + y : x;
            return m.b(h) * m.scale.value();
          };
        },
        reshard, go_backward);
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
      Branches model;
      start(model, world, 77, reshard);
      const auto at = static_cast<std::size_t>(world.rank());
      mean_square(model(own_rows(world, seed), lefts[at], rights[at], recomputes)).backward();
      return Result{shard_gradients(model), arrival_counts(model), shard_counters(model)};
    });
  };
  for (const bool recomputes : {false, true})
    for (const Reshard reshard : kReshards) {
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
        std::vector<Values> alone;
        for (int rank = 0; rank < 2; ++rank)
          alone.push_back(on_ranks(1, [&](World& world) {
            Branches model;
            start(model, world, 77);
            const auto at = static_cast<std::size_t>(rank);
            const Tensor x = positive_rows(seed, rank * 4, 4, 5, world.device());
            mean_square(model(x, c[0][at], c[1][at])).backward();
            return shard_gradients(model);
          })[0]);
        const Values whole = assemble(shards), expected = mean_of(alone, whole);
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
      Branches model;
      start(model, world, 77);
      optim::AdamW optimizer(model.parameters(), {.lr = 0.1, .weight_decay = 0.5});
      Result result;
      result.before = full_values(model);
      mean_square(model(own_rows(world, 3), true, false)).backward();
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

TEST_CASE("a unit that is called twice, its second result unused on one rank", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int rank) -> Pair::Body {
          return [rank](Pair& m, const Tensor& x) {
            const Tensor y = m.a(x), z = m.b(y), again = m.a(z);
            return rank == 0 ? z + again : z;
          };
        },
        reshard, go_backward);
}

TEST_CASE("a parameter of an outer unit that only an inner call uses", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int) -> Pair::Body {
          return [](Pair& m, const Tensor& x) {
            return m.b.call([&] { return linear(x * m.scale.value(), m.b.weight, m.b.bias); });
          };
        },
        reshard, go_backward);
}

TEST_CASE("a penalty on units that stay open, in the loss of one rank", "[threads]") {
  const auto body = [](int rank) -> Pair::Body {
    return [rank](Pair& m, const Tensor& x) {
      const Tensor y = m.b(m.a(x)) * m.scale.value();
      if (rank != 0) return y;
      return y + sum(m.a.weight.value() * m.b.weight.value()) + sum(m.a.bias.value());
    };
  };
  check_on_two(body, Reshard::never, go_backward);
  // The gradients that come before their unit's turn take no slot, so that the ranks' plans agree.
  check_on_two(body, Reshard::never, [](Pair& model, const Tensor& x, int) {
    for (int k = 0; k < 3; ++k) go_backward(model, x);
    CHECK(shard_counters(model).unplanned_slots == 0);
  });
}

TEST_CASE("a branch that is called first and that no loss uses races with no update", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int) -> Pair::Body {
          return [](Pair& m, const Tensor& x) {
            m.a(x);
            return m.b(x);
          };
        },
        reshard,
        [](Pair& model, const Tensor& x, int) {
          optim::SGD optimizer(model.parameters(), {.lr = 0});
          for (int k = 0; k < 3; ++k) {
            optimizer.zero_grad();
            go_backward(model, x);
            optimizer.step();
          }
        });
}

TEST_CASE("blocks that share a trainable condition are recomputed", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int) -> Pair::Body {
          return [](Pair& m, const Tensor& x) {
            const Tensor condition = tanh(x * m.scale.value());
            Tensor h = x;
            for (nn::Linear* layer : {&m.a, &m.b})
              h = recompute([layer](std::span<const Tensor> in) { return (*layer)(in[0]) * in[1]; },
                            std::vector<Tensor>{h, condition});
            return h;
          };
        },
        reshard, go_backward);
}

TEST_CASE("a call without gradients inside a recomputed function is gathered and not reduced",
          "[threads]") {
  const auto results = on_ranks(2, [&](World& world) {
    Pair model([](Pair& m, const Tensor& x) {
      return recompute(
          [&m](const Tensor& in) {
            const Tensor weight = [&] {
              const NoGradGuard no_gradient;
              return m.a(in);
            }();
            return in * m.scale.value() * weight;
          },
          x);
    });
    start(model, world, 5);
    go_backward(model, positive_rows(11, world.rank() * 3, 3, 4, world.device()));
    return shard_counters(model);
  });
  for (const ShardCounters& counters : results) CHECK(counters.reductions == 1);  // the root's
}

TEST_CASE("a recomputed function with a call without gradients, unused on one rank", "[threads]") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int rank) -> Pair::Body {
          return [rank](Pair& m, const Tensor& x) {
            const Tensor y = recompute(
                [&m](const Tensor& in) {
                  const Tensor weight = [&] {
                    const NoGradGuard no_gradient;
                    return m.a(in);
                  }();
                  return m.b(in) * weight;
                },
                x);
            const Tensor own = x * m.scale.value();
            return rank == 0 ? own + y : own;
          };
        },
        reshard, go_backward);
}

TEST_CASE("a rank that leaves a backward out says so in its place", "[threads]") {
  const auto bodies = [](int) -> Pair::Body {
    return [](Pair& m, const Tensor& x) { return m.b(tanh(m.a(x))) * m.scale.value(); };
  };
  for (const Reshard reshard : kReshards) {
    check_on_two(bodies, reshard, [](Pair& model, const Tensor& x, int rank) {
      const Tensor loss = mean_square(model(x));
      rank == 1 ? skip_backward(loss) : loss.backward();
    });
  }
}

TEST_CASE("a rank that skips one of two outputs leaves open with it what its peers do",
          "[threads]") {
  const auto bodies = [](int) -> Pair::Body {  // b is not called
    return [](Pair& m, const Tensor& x) { return m.a(x) * m.scale.value(); };
  };
  const auto step = [](bool is_listed) {
    return [=](Pair& model, const Tensor& x, int rank) {
      shard_plan(model);
      if (is_listed)
        set_modules_to_backward_prefetch(model, {&model.b});
      else
        unshard(model.b);
      const Tensor first = mean_square(model(x)), second = mean_square(model(x * 2));
      if (rank == 0) return (first + second).backward();
      skip_backward(second);
      first.backward();
    };
  };
  for (const Reshard reshard : kReshards)
    for (const bool is_listed : {true, false}) check_on_two(bodies, reshard, step(is_listed));
}

TEST_CASE("losses over one trunk go backward one by one, where the graph is retained",
          "[threads]") {
  const auto bodies = [](int) -> Pair::Body {
    return [](Pair& m, const Tensor& x) {
      const Tensor trunk = tanh(m.a(x));
      return recompute([&m](const Tensor& in) { return m.b(in); }, trunk) + trunk * m.scale.value();
    };
  };
  for (const Reshard reshard : kReshards)
    check_on_two(bodies, reshard, [](Pair& model, const Tensor& x, int rank) {
      const Tensor y = model(x);
      const Tensor first = mean_square(y), second = mean_square(y * 2);
      first.backward({}, true);
      rank == 1 ? skip_backward(second) : second.backward();
    });
}

TEST_CASE("ranks of which one leaves out a backward without a word hear which, and what to say",
          "[threads]") {
  for (const bool goes_on : {false, true}) {
    INFO(goes_on);
    const auto heard = heard_on_two([&](Pair& model, const Tensor& x, World& world) {
      go_backward(model, x);
      const Tensor loss = mean_square(model(x));  // forward 2
      if (world.rank() == 0) loss.backward();
      if (goes_on) go_backward(model, x);
    });
    for (std::size_t rank = 0; rank < (goes_on ? 2 : 1); ++rank)
      CHECK_THAT(heard[rank],
                 Contains("in the backward of forward 2") && Contains("skip_backward(model)"));
  }
}

TEST_CASE("skip_backward refuses what has no forward", "[threads]") {
  const auto said = on_ranks(1, [&](World& world) {
    Pair model([](Pair& m, const Tensor& x) { return m.b(m.a(x)); });
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    shard_each({&model.a, &model}, options);
    model.materialize(world.device());
    return std::pair(thrown_by([&] { skip_backward(Tensor::ones({1}, f32, world.device())); }),
                     thrown_by([&] { skip_backward(model.b); }));
  })[0];
  CHECK_THAT(said.first, Contains("has no history"));
  CHECK_THAT(said.second, Contains("is no root"));
}
