// The `cuda` executor on emulated streams: order, events, failures, collectives, and that the host
// sleeps only where it must.
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "runtime/device/queue.hpp"
#include "tessera/base/log.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::counts;
using tessera::testing::Delays;
using tessera::testing::queued_gpu;

namespace {

// The sum of `inputs`, queued on the stream of the launch.
void launch_sum(const Stream& stream, std::uint32_t* out, std::array<const void*, 3> inputs) {
  stream.launch({.name = "sum"}, [out, inputs](Exec& exec) {
    kernels::kernels_of(exec.driver)
        .reduce_peers({out, inputs.data(), 1, 3, DType::i32, kernels::PeersOp::sum}, exec);
  });
}

// A random program over a few cells and streams; each operation adds three cells into one, behind
// the last writers and readers that it must not overtake.
struct Hazards {
  static constexpr int kCells = 6;
  std::array<std::uint32_t, kCells> cells = {1, 2, 3, 4, 5, 6};
  std::array<Event, kCells> last_write;
  std::array<std::vector<Event>, kCells> reads;

  void step(const Device& device, std::mt19937_64& rng) {
    const Stream stream = device.stream(static_cast<StreamId>(rng() % 5));
    const std::size_t target = rng() % kCells, a = rng() % kCells, b = rng() % kCells;
    for (const std::size_t cell : {target, a, b}) stream.wait(last_write[cell]);
    for (const Event& read : reads[target]) stream.wait(read);
    launch_sum(stream, &cells[target], {&cells[target], &cells[a], &cells[b]});
    const Event done = stream.record();
    last_write[target] = done;
    reads[target].clear();
    for (const std::size_t cell : {a, b})
      if (cell != target) reads[cell].push_back(done);
  }
};

// What each rank threw.
template <class F>
std::vector<std::string> on_ranks(int size, AbortSignal& abort_signal, const F& f) {
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const Device device = queued_gpu(rank);
        f(device, rank);
        device.synchronize();
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
        abort_signal.abort(error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

}  // namespace

TEST_CASE("events order emulated streams: a random program gives what a plain loop gives",
          "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  Hazards expected, got;
  {
    std::mt19937_64 rng(seed);
    const Device device = Device::cpu({.executor = ExecutorKind::inlined});
    for (int i = 0; i < 400; ++i) expected.step(device, rng);
  }
  {
    const Delays delays(seed, 100);
    std::mt19937_64 rng(seed);
    const Device device = queued_gpu();
    for (int i = 0; i < 400; ++i) got.step(device, rng);
    device.synchronize();
  }
  CHECK(got.cells == expected.cells);
}

TEST_CASE("a steady loop makes no event, no stream, and blocks only where the program does",
          "[threads]") {
  const Device device = queued_gpu();
  std::uint32_t cell = 0;
  const auto step = [&] {
    for (int i = 0; i < 20; ++i) {
      launch_sum(device.compute(), &cell, {&cell, &cell, &cell});
      device.gather().wait(device.compute().record());
      launch_sum(device.gather(), &cell, {&cell, &cell, &cell});
      device.compute().wait(device.gather().record());
    }
    device.block(device.compute().record());
  };
  for (int i = 0; i < 3; ++i) step();
  const auto before = counts();
  for (int i = 0; i < 10; ++i) step();
  const auto after = counts();
  CHECK(after.events == before.events);
  CHECK(after.streams == before.streams);
  CHECK(after.blocks - before.blocks == 10);
  CHECK(after.records - before.records == 10 * 41);
}

TEST_CASE("a body's refusal and a body that throws are kept, and recover ends them", "[threads]") {
  const Device device = queued_gpu(3);
  const bool refuses = GENERATE(false, true);
  std::uint32_t cell = 1;
  device.compute().launch({.name = "bad"}, [refuses](Exec& exec) {
    if (!refuses) throw DataError("value 7 is odd");
    exec.error = "a shape that no kernel has";
  });
  launch_sum(device.compute(), &cell, {&cell, &cell, &cell});
  device.gather().wait(device.compute().record());
  for (int i = 0; i < 2; ++i) {
    try {
      device.block(device.gather().record());
      FAIL("block did not throw");
    } catch (const Error& error) {
      CHECK_THAT(error.what(),
                 Catch::Contains(refuses ? "'bad' on stream compute was refused: a shape"
                                         : "value 7 is odd"));
      CHECK(error.rank() == 3);
    }
  }
  CHECK(cell == 1);
  device.context().recover();
  CHECK(device.context().lost().failed[StreamId::compute] == 1);
  CHECK(device.context().lost().first[StreamId::compute] == 1);
  launch_sum(device.compute(), &cell, {&cell, &cell, &cell});
  device.synchronize();
  CHECK(cell == 3);
}

TEST_CASE("what a body notes is a line of the log, and no failure", "[threads]") {
  const Device device = queued_gpu();
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, const std::string& message) {
    CHECK(level == LogLevel::warning);
    lines.push_back(message);
  });
  device.compute().launch({.name = "slow"}, [](Exec& exec) { exec.note = "by our own kernels"; });
  device.compute().launch({.name = "other"}, [](Exec&) {});
  device.synchronize();
  set_log_sink({});
  CHECK(lines == std::vector<std::string>{"slow: by our own kernels"});
}

TEST_CASE("a kernel that fails on the device is heard of at the next block", "[threads]") {
  const Device device = queued_gpu();
  std::uint32_t cell = 1;
  launch_sum(device.compute(), &cell, {&cell, &cell, &cell});
  tessera::testing::emulator().fail("an illegal address");
  CHECK_THROWS_WITH(device.synchronize(), Catch::Contains("an illegal address"));
  device.context().recover();
  CHECK(device.context().lost().failed[StreamId::compute] == 1);
  CHECK_NOTHROW(device.synchronize());
}

TEST_CASE("the end of the last handle waits for all work", "[threads]") {
  const Delays delays(1, 500);
  std::uint32_t cell = 1, total = 1;
  {
    const Device device = queued_gpu();
    for (int i = 0; i < 10; ++i) launch_sum(device.compute(), &cell, {&cell, &cell, &cell});
  }
  for (int i = 0; i < 10; ++i) total *= 3;
  CHECK(cell == total);
}

TEST_CASE("ranks on one GPU meet: each pulls what its peers' streams have written", "[threads]") {
  const int size = GENERATE(2, 4);
  const std::uint64_t seed = testing::fresh_seed();
  INFO(size << " ranks, seed " << seed);
  const Delays delays(seed, 100);
  constexpr int kRounds = 20;
  AbortSignal abort_signal;
  CollectiveBarrier barrier(abort_signal, size);
  std::array<const void*, 4> board{};
  std::array<std::array<std::uint32_t, kRounds>, 4> results{};
  const auto thrown = on_ranks(size, abort_signal, [&](const Device& device, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::uint32_t input = static_cast<std::uint32_t>(rank + 1), zero = 0;
    for (std::size_t round = 0; round < kRounds; ++round) {
      // The input changes as soon as the collective is done: a peer that still read it would see a
      // wrong sum.
      device.compute().wait(device.gather().record());
      launch_sum(device.compute(), &input, {&input, &input, &zero});
      device.gather().wait(device.compute().record());
      std::uint32_t* const out = &results[r][round];
      const auto body = [out, r, size, board = &board, input = &input](Exec& exec) {
        if (exec.phase == Exec::Phase::publish) {
          (*board)[r] = input;
          return;
        }
        kernels::kernels_of(exec.driver)
            .reduce_peers({out, board->data(), 1, size, DType::i32, kernels::PeersOp::sum}, exec);
      };
      device.gather().launch_collective({.name = "all_reduce"}, &barrier, body);
    }
    device.synchronize();
  });
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(size); ++rank) {
    CHECK(thrown[rank].empty());
    for (std::size_t round = 0; round < kRounds; ++round)
      CHECK(results[rank][round] ==
            (std::uint32_t{2} << round) * static_cast<std::uint32_t>(size * (size + 1) / 2));
  }
}

TEST_CASE("a rank that fails in a collective, or before it, leaves no peer waiting", "[threads]") {
  const std::string where = GENERATE("before", "publish", "run", "host");
  INFO("fails " << where);
  AbortSignal abort_signal;
  CollectiveBarrier barrier(abort_signal, 3);
  const auto thrown = on_ranks(3, abort_signal, [&](const Device& device, int rank) {
    const bool fails = rank == 1;
    if (fails && where == "host") throw DataError("divided by zero");
    if (fails && where == "before")
      device.compute().launch({.name = "divide"},
                              [](Exec&) { throw DataError("divided by zero"); });
    const bool in_publish = fails && where == "publish", in_run = fails && where == "run";
    const auto body = [in_publish, in_run](Exec& exec) {
      if (exec.phase == Exec::Phase::publish ? in_publish : in_run)
        throw DataError("divided by zero");
    };
    device.gather().launch_collective({.name = "gather"}, &barrier, body);
    device.gather().launch_collective({.name = "gather"}, &barrier, [](Exec&) {});
    device.synchronize();
  });
  CHECK(thrown[1] == "divided by zero");
  for (const std::size_t peer : {0, 2}) {
    CHECK_THAT(thrown[peer], Catch::Contains("collective: given up"));
    CHECK_THAT(thrown[peer], Catch::Contains("divided by zero"));
  }
}
