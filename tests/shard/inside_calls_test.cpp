// One order on every rank where more happens than forward and backward: losses inside of calls,
// units that are open outside of theirs, a failure before.
#include "tessera/shard/reset.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/pair.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a call whose inside goes backward reads its parameters behind that, and reduces later") {
  for (const bool is_held : {false, true})
    for (const Reshard reshard : kPolicies)
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
  for (const Reshard reshard : kPolicies)
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
    for (const Reshard reshard : kPolicies)
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
  for (const bool is_resharded : {false, true})
    for (const int user : {0, 1})
      for (const Reshard reshard : kPolicies)
        check_on_two(
            [](int) -> Pair::Body {
              return [](Pair& m, const Tensor& x) { return m.a(x) * m.scale.value(); };
            },
            reshard,
            [&](Pair& model, const Tensor& x, int rank) {
              shard_plan(model);
              unshard(model.b);
              Tensor loss = mean_square(model(x));
              if (rank == user) loss = loss + sum(model.b.weight.value());
              if (is_resharded) tessera::reshard(model.b);
              loss.backward();
            });
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
