// A rank that fails in the middle of a step: its peers are told its name and its reason, and nobody
// waits for ever.
#include <stdexcept>

#include "tests/promises/support.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Where the failing rank throws, in its third step.
enum class Moment {
  before_forward,
  in_a_unit,
  before_backward,
  in_backward,
  in_a_kernel,
  after_step
};
constexpr Moment kMoments[] = {Moment::before_forward, Moment::in_a_unit,   Moment::before_backward,
                               Moment::in_backward,    Moment::in_a_kernel, Moment::after_step};

class Fragile final : public nn::Module {
 public:
  Fragile() : first(5, 6), second(6, 6), third(6, 3) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  Tensor operator()(const Tensor& x, bool in_a_unit, bool in_backward) {
    return call([&] {
      Tensor h = tanh(first(x));
      h = second.call([&] {
        const Tensor y = tanh(linear(h, second.weight, second.bias));
        if (in_a_unit) throw std::runtime_error("no luck");
        return y;
      });
      h = autograd::record("fragile", {h}, h.detach(),
                           [in_backward](const Tensor& g, autograd::Gradients& out) {
                             if (in_backward) throw std::runtime_error("no luck");
                             out.set(0, g);
                           });
      return third(h);
    });
  }
  nn::Linear first, second, third;
};

void step(Fragile& model, optim::AdamW& optimizer, World& world, bool fails, Moment moment) {
  const auto here = [&](Moment p) { return fails && moment == p; };
  const auto throw_here = [&](Moment p) {
    if (here(p)) throw std::runtime_error("no luck");
  };
  throw_here(Moment::before_forward);
  const Tensor x = rows_of(1, world.rank() * 2, 2, 5, world.device());
  const Tensor y = model(x, here(Moment::in_a_unit), here(Moment::in_backward));
  if (here(Moment::in_a_kernel))
    world.device().compute().launch({.name = "unlucky"},
                                    [](Exec&) { throw std::runtime_error("no luck"); });
  throw_here(Moment::before_backward);
  const Tensor loss = mean_square(y);
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  throw_here(Moment::after_step);
  world.sum(loss.item());
}

}  // namespace

TEST_CASE("a rank that throws in a step is named to its peers, and nobody hangs",
          "[promises][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (const int ranks : {2, 3, 4})
      for (const Moment moment : kMoments) {
        const int thrower = (static_cast<int>(moment) + ranks) % ranks;
        INFO(ranks << " ranks on " << name(executor) << ", rank " << thrower << " throws at moment "
                   << static_cast<int>(moment));
        std::vector<std::string> heard(static_cast<std::size_t>(ranks));
        std::string rethrown;
        try {
          run_checked(ranks, {.executor = executor, .threads = 1}, [&](World& world) {
            try {
              Fragile model;
              for (nn::Linear* layer : {&model.first, &model.second, &model.third})
                fully_shard(*layer, {.mesh = DeviceMesh::flat(world)});
              fully_shard(model, {.mesh = DeviceMesh::flat(world)});
              model.materialize(world.device());
              nn::init(model, {1});
              optim::AdamW optimizer(model.parameters());
              for (int k = 0; k < 5; ++k)
                step(model, optimizer, world, k == 2 && world.rank() == thrower, moment);
            } catch (const CommError& error) {
              heard[static_cast<std::size_t>(world.rank())] = error.what();
              throw;
            }
          });
        } catch (const std::exception& error) {
          rethrown = error.what();
        }
        CHECK_THAT(rethrown, Contains("no luck"));
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank == thrower) continue;
          CHECK_THAT(heard[static_cast<std::size_t>(rank)],
                     Contains(concat("rank ", thrower)) && Contains("no luck"));
        }
      }
}

TEST_CASE("after a run that failed the next one trains as ever", "[promises][threads]") {
  const Trained before = train(2, {.threads = 1}, {}, 3, 2);
  for (int round = 0; round < 3; ++round) {
    CHECK_THROWS_WITH(run_checked(2, {.threads = 1},
                                  [&](World& world) {
                                    Trainee trainee(world, {}, 3);
                                    trainee.step(0);
                                    if (world.rank() == round % 2) throw std::runtime_error("stop");
                                    trainee.step(1);
                                    world.device().synchronize();
                                  }),
                      Contains("stop"));
    CHECK(same_bits(before, train(2, {.threads = 1}, {}, 3, 2)));
  }
}
