// One order on every rank where more happens than forward and backward: losses inside of calls,
// units that are open outside of theirs, a failure before.
#include <array>
#include <initializer_list>
#include <memory>

#include "tessera/autograd/recompute.hpp"
#include "tessera/shard/reset.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/pair.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a call whose inside goes backward reads its parameters behind that, and reduces later") {
  for (const bool is_held : {false, true})
    for (const Reshard reshard : kReshards)
      check_on_two(
          [&](int) -> Pair::Body {
            return [is_held](Pair& m, const Tensor& x) {
              const Tensor held = is_held ? m.scale.value() : Tensor();
              mean_square(m.b(tanh(m.a(x)))).backward();
              return x * (is_held ? held : m.scale.value());
            };
          },
          reshard, go_backward);
}

TEST_CASE("losses inside of a call go backward one by one, where the graph is retained") {
  for (const Reshard reshard : kReshards)
    check_on_two(
        [](int) -> Pair::Body {
          return [](Pair& m, const Tensor& x) {
            const Tensor loss = mean_square(m.b(tanh(m.a(x))));
            loss.backward({}, true);
            loss.backward();
            return x * m.scale.value();
          };
        },
        reshard, go_backward);
}

TEST_CASE("a loss inside of a call reduces its unit on a rank that has used nothing of it, too") {
  for (const int user : {0, 1})
    for (const Reshard reshard : kReshards)
      check_on_two(
          [user](int rank) -> Pair::Body {
            return [is_user = rank == user](Pair& m, const Tensor& x) {
              Tensor own = Tensor::ones({1}, f32, x.device());
              own.require_grad();
              const Tensor h = x * own;
              mean_square(is_user ? h * m.scale.value() : h).backward();
              return x * m.scale.value();
            };
          },
          reshard, go_backward);
}

TEST_CASE("what a unit that was opened by hand gives on one rank is reduced on all") {
  for (const bool is_used_first : {false, true})  // before the root's call
    for (const bool is_resharded : {false, true})
      for (const int user : {0, 1})
        for (const Reshard reshard : kReshards) {
          CAPTURE(is_used_first, is_resharded, user, reshard);
          check_on_two(
              [](int) -> Pair::Body {
                return [](Pair& m, const Tensor& x) { return m.a(x) * m.scale.value(); };
              },
              reshard,
              [&](Pair& model, const Tensor& x, int rank) {
                shard_plan(model);
                unshard(model.b);
                const auto used = [&](bool is_first) {
                  return is_first == is_used_first && rank == user ? sum(model.b.weight.value())
                                                                   : Tensor();
                };
                const Tensor before = used(true);
                Tensor loss = mean_square(model(x));
                for (const Tensor& term : {before, used(false)})
                  if (term.defined()) loss = loss + term;
                if (is_resharded) tessera::reshard(model.b);
                loss.backward();
              });
        }
}

TEST_CASE("one rank's use of an opened unit that is called, too, is told by the call's name") {
  const auto heard = heard_on_two([](Pair& model, const Tensor& x, World& world) {
    shard_plan(model);
    unshard(model.a);
    const Tensor before = sum(model.a.weight.value());
    const Tensor loss = mean_square(model(x));
    (world.rank() == 0 ? loss + before : loss).backward();
    model(x);
  });
  for (const std::string& message : heard) CHECK_THAT(message, Contains("a (unshard, outside"));
}

TEST_CASE("a loss inside of a call leaves calls that it does not reach to the pass behind it") {
  for (const bool is_recomputed : {false, true})
    for (const bool is_retained : {false, true})
      for (const int heads : {1, 3})
        for (const Reshard reshard : kReshards) {
          CAPTURE(is_recomputed, is_retained, heads, reshard);
          const auto behind = std::make_shared<std::array<Tensor, 2>>();  // of each rank
          check_on_two(
              [=](int rank) -> Pair::Body {
                return [=, at = static_cast<std::size_t>(rank)](Pair& m, const Tensor& x) {
                  const auto a = [&m](const Tensor& in) { return tanh(m.a(in)); };
                  const Tensor h = is_recomputed ? recompute(a, x) : a(x);
                  Tensor leaf = h.detach();
                  leaf.require_grad();
                  for (int i = 0; i < heads; ++i) mean_square(m.b(leaf)).backward({}, is_retained);
                  (*behind)[at] = leaf.grad();
                  return h;
                };
              },
              reshard,
              [&](Pair& model, const Tensor& x, int rank) {
                const Tensor h = model(x);
                h.backward((*behind)[static_cast<std::size_t>(rank)]);
              });
        }
}

TEST_CASE("passes inside of a call cost no more than what they reach") {
  const auto counters = [](int heads) {
    return on_ranks(2, [&](World& world) {
      Pair model([&](Pair& m, const Tensor& x) {
        const Tensor h = m.a(x);
        Tensor leaf = h.detach();
        leaf.require_grad();
        for (int i = 0; i < heads; ++i) mean_square(m.b(leaf)).backward();
        return h;
      });
      start(model, world, 5, Reshard::always);
      go_backward(model, positive_rows(11, world.rank() * 3, 3, 4, world.device()));
      return shard_counters(model);
    })[0];
  };
  // A head: two gathers of its unit, and its reduction beside the root's.
  const ShardCounters one = counters(1), three = counters(3);
  CHECK(three.gathers - one.gathers == 2 * 2);
  CHECK(three.reductions - one.reductions == 2 * 2);
}

TEST_CASE("a backward that is left out after a reset is named as on all ranks", "[threads]") {
  const auto heard = heard_on_two([](Pair& model, const Tensor& x, World& world) {
    go_backward(model, x);
    try {
      if (world.rank() == 1) throw std::runtime_error("before its forward");
      go_backward(model, x);
      world.device().synchronize();
    } catch (const std::exception&) {
      reset(model);
    }
    const Tensor loss = mean_square(model(x));
    if (world.rank() == 0) loss.backward();
    go_backward(model, x);
  });
  CHECK(heard[0] == heard[1]);
  CHECK_THAT(heard[0],
             Contains("in the backward of forward 3") && Contains("skip_backward(model)"));
}
