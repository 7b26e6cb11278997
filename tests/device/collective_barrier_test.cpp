// Collectives between rank threads: nobody starts early, nobody leaves early, and nobody is
// left behind.
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/device/ranks.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::any_executor;
using tessera::testing::Ranks;

namespace {

constexpr int kMaxRanks = 4;

// A sum over ranks by pulling: each publishes where its input lies, then adds up everybody's.
struct Board {
  std::array<const long*, kMaxRanks> inputs{};
};

void all_reduce(const Stream& stream, CollectiveBarrier& barrier, Board& board, long* output,
                const long* input) {
  Board* const b = &board;
  const int size = barrier.size();
  stream.launch_collective({.name = "all_reduce"}, &barrier, [b, size, output, input](Exec& exec) {
    if (exec.phase == Exec::Phase::publish) {
      b->inputs[static_cast<std::size_t>(exec.rank)] = input;
      return;
    }
    *output = 0;
    for (int r = 0; r < size; ++r) *output += *b->inputs[static_cast<std::size_t>(r)];
  });
}

}  // namespace

TEST_CASE("a collective of 2 to 4 ranks pulls everyone's input, again and again", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  const ExecutorChoice executor = any_executor(seed);
  const int size = GENERATE(2, 3, 4);
  INFO(name(executor) << ", " << size << " ranks, seed " << seed);
  constexpr int kRounds = 50;
  Ranks ranks(executor, size);
  Board board;
  std::array<std::vector<long>, kMaxRanks> results;
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    long input = 0, sum = 0;
    long *const in = &input, *const out = &sum;
    std::vector<long>* const results_here = &results[static_cast<std::size_t>(rank)];
    for (int round = 0; round < kRounds; ++round) {
      // The input is overwritten as soon as the collective is done: a peer that still read it would
      // see a wrong sum.
      device.compute().wait(device.gather().record());
      device.compute().launch({.name = "fill"}, [=](Exec&) { *in = 10 * round + rank; });
      device.gather().wait(device.compute().record());
      all_reduce(device.gather(), ranks.barrier, board, out, in);
      device.gather().launch({.name = "note"}, [=](Exec&) { results_here->push_back(*out); });
    }
    device.synchronize();
  });
  for (int r = 0; r < size; ++r) {
    INFO("rank " << r);
    CHECK(thrown[static_cast<std::size_t>(r)] == "");
    REQUIRE(results[static_cast<std::size_t>(r)].size() == kRounds);
    for (int round = 0; round < kRounds; ++round)
      CHECK(results[static_cast<std::size_t>(r)][static_cast<std::size_t>(round)] ==
            size * 10 * round + size * (size - 1) / 2);
  }
}

TEST_CASE("without a barrier a collective's body runs once, in its run phase") {
  const Device device = Device::cpu({.executor = any_executor()});
  int published = 0, ran = 0;
  int *const p = &published, *const r = &ran;
  device.gather().launch_collective({.name = "alone"}, nullptr, [p, r](Exec& exec) {
    ++*(exec.phase == Exec::Phase::publish ? p : r);
  });
  device.synchronize();
  CHECK(published == 0);
  CHECK(ran == 1);
}

TEST_CASE("a body that fails on one rank fails its peers instead of leaving them asleep",
          "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  const ExecutorChoice executor = any_executor(seed);
  const std::string where = GENERATE("before", "publish", "run");
  INFO(name(executor) << ", fails " << where << ", seed " << seed);
  Ranks ranks(executor, 3);
  ranks.host_aborts = false;  // the device alone has to tell the peers
  const int how = where == "before" ? 0 : where == "publish" ? 1 : 2;
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    if (rank == 1 && how == 0) {
      device.compute().launch({.name = "divide"},
                              [](Exec&) { throw DataError("divided by zero"); });
      device.gather().wait(device.compute().record());
    }
    const Exec::Phase bad = how == 1 ? Exec::Phase::publish : Exec::Phase::run;
    const bool fails = rank == 1 && how != 0;
    device.gather().launch_collective({.name = "gather"}, &ranks.barrier, [bad, fails](Exec& exec) {
      if (fails && exec.phase == bad) throw DataError("divided by zero");
    });
    device.gather().launch_collective({.name = "gather"}, &ranks.barrier, [](Exec&) {});
    device.synchronize();
  });
  CHECK(thrown[1] == "divided by zero");
  for (const int peer : {0, 2}) {
    CHECK_THAT(thrown[static_cast<std::size_t>(peer)], Catch::Contains("collective: given up"));
    CHECK_THAT(thrown[static_cast<std::size_t>(peer)], Catch::Contains("divided by zero"));
  }
}

TEST_CASE("a host that dies between collectives wakes its peers", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  const ExecutorChoice executor = any_executor(seed);
  INFO(name(executor) << ", seed " << seed);
  Ranks ranks(executor, 3);
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    for (int i = 0; i < 4; ++i) {
      if (rank == 2 && i == 2) throw DataError("the file is gone");
      device.gather().launch_collective({.name = "gather"}, &ranks.barrier, [](Exec&) {});
    }
    device.synchronize();
  });
  CHECK(thrown[2] == "the file is gone");
  CHECK_THAT(thrown[0], Catch::Contains("the file is gone"));
  CHECK_THAT(thrown[1], Catch::Contains("the file is gone"));
}

TEST_CASE("a collective that is given up ends on no rank while a peer may still read its bytes",
          "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  const ExecutorChoice executor = any_executor(seed);
  INFO(name(executor) << ", seed " << seed);
  Ranks ranks(executor, 2);
  std::atomic<bool> reads{true};
  bool ended_early = true;
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    device.gather().launch_collective(
        {.name = "gather"}, &ranks.barrier,
        [rank, abort_signal = &ranks.abort_signal, r = &reads](Exec& exec) {
          if (exec.phase == Exec::Phase::publish || rank == 0) return;
          abort_signal->abort("enough");
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time to leave too early
          *r = false;
        });
    try {
      device.synchronize();
    } catch (const CommError&) {
      if (rank == 0) ended_early = reads;  // here a rank gives its buffers back
      throw;
    }
  });
  CHECK_FALSE(ended_early);
  for (const std::string& what : thrown) CHECK_THAT(what, Catch::Contains("enough"));
}

TEST_CASE("the first reason of an abort wins, and is thrown ever after") {
  AbortSignal abort_signal;
  CollectiveBarrier barrier(abort_signal, 2);
  CHECK_FALSE(abort_signal.aborted());
  abort_signal.abort("rank 1 left");
  abort_signal.abort("rank 0 left");
  CHECK(abort_signal.aborted());
  CHECK(abort_signal.reason() == "rank 1 left");
  CHECK_THROWS_AS(barrier.enter(), CommError);
  CHECK_THROWS_WITH(barrier.enter(), Catch::Contains("rank 1 left"));
}
