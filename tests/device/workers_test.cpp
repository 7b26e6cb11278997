// The threads inside a kernel: every task once, whoever does it.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/workers.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

// Runs `count` tasks and returns how often each was called.
std::vector<int> calls(WorkerPool* pool, std::int64_t count) {
  std::vector<int> calls(static_cast<std::size_t>(count));
  Exec exec;
  exec.workers = pool;
  parallel_for(exec, count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
  return calls;
}

}  // namespace

TEST_CASE("parallel_for calls each task once, for any number of threads and tasks", "[threads]") {
  const int threads = GENERATE(1, 2, 4);
  const std::uint64_t seed = testing::fresh_seed();
  INFO(threads << " threads, seed " << seed);
  std::mt19937_64 rng(seed);
  WorkerPool pool(threads);
  CHECK(pool.threads() == threads);
  for (int round = 0; round < 300; ++round) {
    const auto count = static_cast<std::int64_t>(rng() % 20);
    REQUIRE(calls(&pool, count) == std::vector<int>(static_cast<std::size_t>(count), 1));
  }
  CHECK(calls(nullptr, 5) == std::vector<int>(5, 1));
}

TEST_CASE("a pool's threads take part", "[threads]") {
  WorkerPool pool(2);
  std::atomic<int> here = 0;
  Exec exec;
  exec.workers = &pool;
  bool met[2] = {};
  parallel_for(exec, 2,
               [&](std::int64_t i) {  // returns early only when two threads are inside at once
                 here.fetch_add(1);
                 for (int ms = 0; ms < 10000 && here.load() < 2; ++ms)
                   std::this_thread::sleep_for(std::chrono::milliseconds(1));
                 met[i] = here.load() == 2;
               });
  CHECK(met[0]);
  CHECK(met[1]);
}

TEST_CASE("run returns when the slowest task is done, not when the caller has none left",
          "[threads]") {
  WorkerPool pool(2);
  Exec exec;
  exec.workers = &pool;
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 10; ++round) {
    int done[4] = {};
    parallel_for(exec, 4, [&](std::int64_t i) {
      std::this_thread::sleep_for(
          std::chrono::milliseconds(std::this_thread::get_id() == caller ? 1 : 10));
      done[i] = 1;
    });
    REQUIRE(done[0] + done[1] + done[2] + done[3] == 4);
  }
}

TEST_CASE("streams that share a busy pool do their work themselves", "[threads]") {
  WorkerPool pool(2);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> streams;
  for (int s = 0; s < 3; ++s)
    streams.emplace_back([&] {
      for (int round = 0; round < 300; ++round)
        if (calls(&pool, 7) != std::vector<int>(7, 1)) ++wrong;
    });
  for (std::thread& stream : streams) stream.join();
  CHECK(wrong == 0);
}

TEST_CASE("a pool has at least the caller") { CHECK_THROWS_AS(WorkerPool(0), ContractError); }
