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
  for (const Reshard reshard : kPolicies)
    check_on_two(
        [](int rank) -> Pair::Body {
          return [rank](Pair& m, const Tensor& x) {
            const Tensor y = m.a(x), h = rank == 0 ? x + y : x;
            return m.b(h) * m.scale.value();
          };
        },
        reshard, go_backward);
}

TEST_CASE("a unit that is called twice, its second result unused on one rank", "[threads]") {
  for (const Reshard reshard : kPolicies)
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
  for (const Reshard reshard : kPolicies)
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
  for (const Reshard reshard : kPolicies)
    check_on_two(
        [](int) -> Pair::Body {
          return [](Pair& m, const Tensor& x) {
            m.a(x);
            return m.b(x);
          };
        },
        reshard,
        [](Pair& model, const Tensor& x, int) {
          optim::Sgd optimizer(model.parameters(), {.lr = 0});
          for (int k = 0; k < 3; ++k) {
            optimizer.zero_grad();
            go_backward(model, x);
            optimizer.step();
          }
        });
}

TEST_CASE("blocks that share a trainable condition are recomputed", "[threads]") {
  for (const Reshard reshard : kPolicies)
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
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    fully_shard(model.a, options);
    fully_shard(model.b, options);
    fully_shard(model, options);
    model.materialize(world.device());
    nn::init(model, {5});
    go_backward(model, positive_rows(11, world.rank() * 3, 3, 4, world.device()));
    return shard_counters(model);
  });
  for (const ShardCounters& counters : results) CHECK(counters.reductions == 1);  // the root's
}

TEST_CASE("a recomputed function with a call without gradients, unused on one rank", "[threads]") {
  for (const Reshard reshard : kPolicies)
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
  for (const Reshard reshard : kPolicies) {
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
  for (const Reshard reshard : kPolicies)
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
  for (const Reshard reshard : kPolicies)
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

TEST_CASE("a backward whose parameters were updated since its forward is an error, not wrong") {
  for (const int ranks : {1, 2})
    for (const bool recomputed : {false, true})
      for (const Reshard reshard : kPolicies) {
        INFO(ranks << " ranks, recomputed " << recomputed);
        const auto said = on_ranks(ranks, [&](World& world) {
          Pair model([recomputed](Pair& m, const Tensor& x) {
            const auto both = [&m](const Tensor& in) { return m.b(tanh(m.a(in))); };
            return recomputed ? recompute(both, x) : both(x);
          });
          const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                     .reshard_after_forward = reshard};
          fully_shard(model.a, options);
          fully_shard(model.b, options);
          fully_shard(model, options);
          model.materialize(world.device());
          nn::init(model, {5});
          optim::Sgd optimizer(model.parameters(), {.lr = 0.5});
          const Tensor x = positive_rows(11, 0, 3, 4, world.device());
          const Tensor first = mean_square(model(x)), second = mean_square(model(x));
          second.backward();
          optimizer.step();
          const std::string what = thrown_by([&] { first.backward(); });
          reset(model);
          go_backward(model, x);  // goes on
          return what;
        });
        for (const std::string& what : said)
          CHECK_THAT(what, Contains("updated") && Contains("go backward first"));
      }
}

TEST_CASE("a full parameter can't be written inside its call") {
  const auto said = on_ranks(2, [](World& world) {
    nn::Linear layer(4, 4);
    fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
    layer.materialize(world.device());
    return thrown_by(
        [&] { layer.call([&] { return raw::fill(layer.weight.value(), 1), Tensor(); }); });
  });
  for (const std::string& what : said) CHECK_THAT(what, Contains("'weight' is read-only"));
}

TEST_CASE("skip_backward refuses what has no forward", "[threads]") {
  const auto said = on_ranks(1, [&](World& world) {
    Pair model([](Pair& m, const Tensor& x) { return m.b(m.a(x)); });
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    fully_shard(model.a, options);
    fully_shard(model, options);
    model.materialize(world.device());
    return std::pair(thrown_by([&] { skip_backward(Tensor::ones({1}, f32, world.device())); }),
                     thrown_by([&] { skip_backward(model.b); }));
  })[0];
  CHECK_THAT(said.first, Contains("has no history"));
  CHECK_THAT(said.second, Contains("is no root"));
}

TEST_CASE("a sharded model may die before its backward", "[threads]") {
  for (const Reshard reshard : kPolicies) {
    const auto losses = on_ranks(2, [&](World& world) {
      const auto loss_of_nobody = [&] {
        Pair model([](Pair& m, const Tensor& x) { return m.b(m.a(x)) * m.scale.value(); });
        const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                   .reshard_after_forward = reshard};
        fully_shard(model.a, options);
        fully_shard(model, options);
        model.materialize(world.device());
        nn::init(model, {5});
        return mean_square(model(positive_rows(11, 0, 3, 4, world.device())));
      };
      const Tensor loss = loss_of_nobody();
      loss.backward();
      return loss.item();
    });
    CHECK(losses[0] == losses[1]);
    CHECK(losses[0] > 0);
  }
}

TEST_CASE("a model may die before its backward") {
  const Device device = Device::cpu();
  const auto loss_of_nobody = [&] {
    nn::Linear layer(4, 4, device);
    nn::init(layer, {3});
    return mean_square(layer(Tensor::ones({2, 4}, f32, device)));
  };
  const Tensor loss = loss_of_nobody();
  loss.backward();
  CHECK(loss.item() >= 0);
}
