// A Pair on 2 ranks, against one.
#pragma once

#include <functional>

#include "tests/shard/support.hpp"

namespace tessera::testing {

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
      start(model, world, 5, reshard);
      step(model, positive_rows(11, rank * 3, 3, 4, world.device()), rank);
      return PairResult{shard_gradients(model), shard_counters(model)};
    });
  };
  const std::vector<PairResult> both = run(2, 0);
  CHECK(both[0].counters.gathers == both[1].counters.gathers);
  CHECK(both[0].counters.reductions == both[1].counters.reductions);
  const Values whole = assemble({both[0].gradients, both[1].gradients});
  const Values expected = mean_of({run(1, 0)[0].gradients, run(1, 1)[0].gradients}, whole);
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
                              shard_each({&model.a, &model}, {.mesh = DeviceMesh::flat(world)});
                              nn::init(model, {5}, world.device());
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
