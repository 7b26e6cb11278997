// Ranks as threads of one process: values, bits, the order of the world, sums and barriers.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "tessera/comm/mesh.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/comm/battery.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::executors;
using tessera::testing::run_checked;

namespace {

std::vector<battery::Result> run_battery(int ranks, const WorldOptions& options,
                                         std::uint64_t seed) {
  std::vector<battery::Result> results(static_cast<std::size_t>(ranks));
  run_checked(ranks, options, [&](World& world) {
    results[static_cast<std::size_t>(world.rank())] = battery::run(world, seed);
  });
  return results;
}

}  // namespace

TEST_CASE("local: every collective is right, with the same bits on every executor",
          "[comm][threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    std::vector<battery::Result> first;
    for (const ExecutorChoice& executor : executors(seed)) {
      INFO(ranks << " ranks, " << name(executor));
      const auto results = run_battery(ranks, {.executor = executor}, seed);
      for (const auto& result : results)
        for (const std::string& error : result.errors) FAIL_CHECK(error);
      if (first.empty()) first = results;
      for (int r = 0; r < ranks; ++r)
        CHECK(results[static_cast<std::size_t>(r)].hash == first[static_cast<std::size_t>(r)].hash);
    }
  }
}

TEST_CASE("local: different inputs give different hashes", "[comm][threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  CHECK(run_battery(2, {}, seed)[0].hash != run_battery(2, {}, seed + 1)[0].hash);
}

TEST_CASE("local: a shuffled world repeats its trace for a seed and varies over seeds",
          "[comm][threads]") {
  // 20 gathers and 20 reductions that no event orders have 40! / (20! 20!) schedules.
  const auto trace = [](std::uint64_t seed) {
    std::uint64_t hash = 0;
    run_checked(3, {.executor = testing::shuffled(seed, &hash)}, [](World& world) {
      float values[2] = {1, 2};
      const auto reduce = [&](float& v) {
        return Collective{.send = &v, .recv = &v, .count = 1, .kind = CollectiveKind::all_reduce};
      };
      for (int i = 0; i < 20; ++i) {
        world.gather().submit(reduce(values[0]), "gather", {});
        world.reduce().submit(reduce(values[1]), "reduce", {});
      }
      world.device().synchronize();
    });
    return hash;
  };
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  CHECK(trace(seed) == trace(seed));
  // Three in ten seeds draw anew at each choice (see Note [A mix of schedules]), and no two of
  // those agree; the others keep priorities and may. Fewer than 4 of the former among 64: (1 + 27 +
  // 370 + 3278) 0.7^64, one run in two million.
  std::set<std::uint64_t> traces;
  for (std::uint64_t s = seed; s < seed + 64; ++s) traces.insert(trace(s));
  CHECK(traces.size() >= 4);
}

TEST_CASE("local: sum and max are the same on every rank", "[comm][threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  for (const ExecutorChoice& executor : executors())
    for (int ranks = 1; ranks <= 4; ++ranks) {
      INFO(ranks << " ranks, " << name(executor));
      std::mt19937_64 draw(seed);
      std::uniform_real_distribution<double> uniform(-1, 1);
      std::vector<double> values, sums(4), maxima(4), lows(4), nans(4), spreads(4), pairs(4);
      for (int r = 0; r < ranks; ++r) values.push_back(uniform(draw));
      run_checked(ranks, {.executor = executor}, [&](World& world) {
        const auto r = static_cast<std::size_t>(world.rank());
        sums[r] = world.sum(values[r]);
        maxima[r] = world.max(values[r]);
        lows[r] = world.max(-std::numeric_limits<double>::infinity());
        nans[r] = world.max(r == 0 ? std::nan("") : 1.0);
        double several[] = {values[r], -values[r]};
        world.max(several);
        spreads[r] = several[0] + several[1];
        double pair[] = {values[r], 1};
        world.sum(pair);
        pairs[r] = pair[0] / pair[1];
      });
      double sum = 0;  // in rank order, as the communicator adds: equal to the bit
      for (const double v : values) sum += v;
      const auto [least, most] = std::ranges::minmax(values);
      for (std::size_t r = 0; r < values.size(); ++r) {
        CHECK(spreads[r] == most - least);
        CHECK(pairs[r] == sum / ranks);
        CHECK(sums[r] == sum);
        CHECK(maxima[r] == *std::max_element(values.begin(), values.end()));
        CHECK(lows[r] == -std::numeric_limits<double>::infinity());
        CHECK(std::isnan(nans[r]));
      }
    }
}

TEST_CASE("local: nobody leaves a barrier before all have come", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    constexpr int kRanks = 4, kRounds = 50;
    std::atomic<int> arrived{0}, early{0};
    run_checked(kRanks, {.executor = executor}, [&](World& world) {
      for (int round = 1; round <= kRounds; ++round) {
        ++arrived;
        world.barrier();
        if (arrived.load() < round * kRanks) ++early;
      }
    });
    INFO(name(executor));
    CHECK(arrived == kRanks * kRounds);
    CHECK(early == 0);
  }
}

TEST_CASE("local: a world knows its ranks, streams and threads", "[comm][threads]") {
  std::atomic<int> ranks_seen{0}, wrong{0};
  run_checked(3, {.threads = 2}, [&](World& world) {
    ranks_seen += 1 << world.rank();
    const DeviceMesh mesh = DeviceMesh::flat(world);
    wrong += world.kind() != WorldKind::local || world.size() != 3 || world.threads() != 2;
    wrong += world.device().rank() != world.rank() || mesh.shard_rank() != world.rank();
    wrong += mesh.shard_size() != 3 || &mesh.world() != &DeviceMesh::flat(world).world();
    wrong += world.gather().stream() != StreamId::gather || world.gather().role() != "gather";
    wrong += world.reduce().stream() != StreamId::reduce || world.reduce().size() != 3;
    wrong +=
        world.control().stream() != StreamId::compute || world.control().rank() != world.rank();
  });
  CHECK(ranks_seen == 0b111);
  CHECK(wrong == 0);
  int threads = 0;
  run_checked(64, {.executor = ExecutorKind::inlined}, [&](World& world) {
    if (world.rank() == 0) threads = world.threads();
  });
  CHECK(threads >= 1);
  CHECK(name(WorldKind::emulated) == "emulated");
}

TEST_CASE("local: one group is one operation, and fingerprints agree", "[comm][threads]") {
  std::vector<std::uint64_t> fingerprints(2), operations(2), launches(2);
  run_checked(2, {}, [&](World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    float values[6] = {1, 2, 3, 4, 5, 6};
    const Collective one{
        .send = values, .recv = values, .count = 2, .kind = CollectiveKind::all_reduce};
    Collective other = one;
    other.send = other.recv = values + 2;
    Collective third = one;
    third.send = third.recv = values + 4;
    const CollectiveGroup group("three", {one, other, third});
    world.control().submit(group, {});
    world.control().submit(one, "alone", {});
    world.device().synchronize();
    fingerprints[r] = world.flight_recorder().fingerprint();
    operations[r] = world.control().submitted();
    launches[r] = world.device().context().launches();
  });
  CHECK(operations == std::vector<std::uint64_t>{2, 2});
  CHECK(launches == std::vector<std::uint64_t>{2, 2});
  CHECK(fingerprints[0] == fingerprints[1]);
  CHECK(fingerprints[0] != 0);
}
