// A model of two units and a root, whose body is the test's, on 2 ranks against one.
#pragma once

#include <functional>

#include "tests/shard/support.hpp"

namespace tessera::testing {

inline constexpr Reshard kPolicies[] = {Reshard::automatic, Reshard::always, Reshard::never};

// A root with a parameter of its own and two layers, each a unit, and a body of the test's.
class Pair final : public nn::Module {
 public:
  using Body = std::function<Tensor(Pair&, const Tensor&)>;
  explicit Pair(Body f)
      : a(4, 4), b(4, 4), scale({4}, Initializer::normal(0, 0)), body(std::move(f)) {
    register_module("a", a);
    register_module("b", b);
    register_parameter("scale", scale);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return body(*this, x); });
  }
  nn::Linear a, b;
  Parameter scale;
  Body body;
};

struct PairResult {
  Values gradients;
  ShardCounters counters;
};

// `program` on 2 ranks, against the mean of what each rank's graph has alone on one.
inline void check_on_two(const std::function<Pair::Body(int rank)>& body, Reshard reshard,
                         const std::function<void(Pair&, const Tensor&, int rank)>& step) {
  const auto run = [&](int ranks, int as_rank) {
    return on_ranks(ranks, [&](World& world) {
      const int rank = ranks == 1 ? as_rank : world.rank();
      Pair model(body(rank));
      const ShardOptions options{.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard};
      fully_shard(model.a, options);
      fully_shard(model.b, options);
      fully_shard(model, options);
      model.materialize(world.device());
      nn::init(model, {5});
      step(model, positive_rows(11, rank * 3, 3, 4, world.device()), rank);
      return PairResult{shard_gradients(model), shard_counters(model)};
    });
  };
  const std::vector<PairResult> both = run(2, 0);
  CHECK(both[0].counters.gathers == both[1].counters.gathers);
  CHECK(both[0].counters.reductions == both[1].counters.reductions);
  const Values whole = assemble({both[0].gradients, both[1].gradients});
  const Values one = run(1, 0)[0].gradients, other = run(1, 1)[0].gradients;
  Values expected;
  for (const auto& [name, values] : whole) {
    auto& mean = expected[name];
    mean.resize(values.size());
    for (const Values& alone : {one, other})
      if (const auto found = alone.find(name); found != alone.end())
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += 0.5f * found->second[i];
  }
  CHECK(distance(expected, whole) < kRounding);
}

inline void go_backward(Pair& model, const Tensor& x, int = 0) { mean_square(model(x)).backward(); }

// What each of 2 ranks hears, of which one leaves out what the other does: a CommError, or nothing
// where it has ended by then.
inline std::vector<std::string> heard_on_two(
    const std::function<void(Pair&, const Tensor&, World&)>& program) {
  std::vector<std::string> heard(2);
  CHECK_THROWS_AS(run_local(2, {.threads = 1},
                            [&](World& world) {
                              Pair model([](Pair& m, const Tensor& x) { return m.b(m.a(x)); });
                              const ShardOptions options{.mesh = DeviceMesh::flat(world)};
                              fully_shard(model.a, options);
                              fully_shard(model, options);
                              model.materialize(world.device());
                              nn::init(model, {5});
                              try {
                                program(model, positive_rows(11, 0, 3, 4, world.device()), world);
                                world.device().synchronize();
                              } catch (const CommError& error) {
                                heard[static_cast<std::size_t>(world.rank())] = error.what();
                                throw;
                              }
                            }),
                  CommError);
  return heard;
}

}  // namespace tessera::testing
