// The device table: what its formulae must hold whatever its numbers are, and how the virtual clock
// follows them.
#include "tessera/detail/device/machine.hpp"

#include <cmath>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

Machine with(Machine machine, WireAlgorithm wire) {
  machine.wire = wire;
  return machine;
}

double gather_seconds(const Machine& machine, int ranks, double gathered_bytes) {
  return collective_seconds(machine, ranks, 1, 2 * gathered_bytes * (ranks - 1) / ranks);
}

// Whole numbers, so that times of the clock are exact.
constexpr Machine kExact{.name = "exact",
                         .product_flops_per_second = 1024,
                         .f32_product_flops_per_second = 1024,
                         .copy_bytes_per_second = 64,
                         .multiprocessors = 1,
                         .gpus = 2,
                         .link_bytes_per_second = 16,
                         .network_bytes_per_second = 4,
                         .start_seconds = 1,
                         .contention = 1,
                         .host_link_bytes_per_second = 8,
                         .host_memory_bytes_per_second = 32};

}  // namespace

TEST_CASE("a collective of one rank costs nothing, and more bytes or more ranks cost more") {
  for (const Machine& table : kMachines)
    for (const WireAlgorithm wire : {WireAlgorithm::ring, WireAlgorithm::two_level}) {
      const Machine machine = with(table, wire);
      INFO(machine.name);
      CHECK(gather_seconds(machine, 1, 1e9) == 0);
      double fewer = 0;
      for (int ranks = 2; ranks <= 16384; ranks *= 2) {
        INFO(ranks << " ranks");
        const double seconds = gather_seconds(machine, ranks, 1e9);
        CHECK(seconds > fewer);
        CHECK(gather_seconds(machine, ranks, 2e9) > seconds);
        // No faster than the links into a GPU; within a machine that is NVLink alone.
        const double rate = machine.link_bytes_per_second +
                            (ranks > machine.gpus ? machine.network_bytes_per_second : 0);
        CHECK(seconds > 1e9 * (ranks - 1) / ranks / rate);
        fewer = seconds;
      }
    }
}

TEST_CASE("two levels are a ring within a machine, and beat it across machines, by latency most") {
  for (const Machine& table : kMachines) {
    const Machine ring = with(table, WireAlgorithm::ring),
                  levels = with(table, WireAlgorithm::two_level);
    INFO(table.name);
    CHECK(gather_seconds(levels, table.gpus, 1e8) == gather_seconds(ring, table.gpus, 1e8));
    double gain = 1;
    for (int ranks = 4 * table.gpus; ranks <= 16384; ranks *= 4) {
      const double now = gather_seconds(ring, ranks, 1e8) / gather_seconds(levels, ranks, 1e8);
      INFO(ranks << " ranks");
      CHECK(now > gain);
      gain = now;
    }
    CHECK(gain > 10);
  }
  // NCCL's constants: 2.4 ms of latency in a ring of 512.
  CHECK(std::abs(gather_seconds(with(kH100, WireAlgorithm::ring), 512, 0) - 2.41e-3) < 0.02e-3);
}

TEST_CASE("ranks of one number in each machine meet over the network alone") {
  CHECK(ranks_a_machine(kH100, 64, 8) == 1);
  CHECK(ranks_a_machine(kH100, 16, 4) == 2);
  CHECK(ranks_a_machine(kH100, 3, 1) == 3);
  CHECK(collective_seconds(kH100, 8, 8, 1e9) > 5 * collective_seconds(kH100, 8, 1, 1e9));
}

TEST_CASE("products reach less where they are small, thin or in f32") {
  const auto rate = [](std::int32_t m, std::int32_t n, std::int32_t k, DType dtype = bf16) {
    return product_rate(
        kH100,
        {.kind = Products::Kind::matrix, .dtype = dtype, .batch = 1, .m = m, .n = n, .k = k});
  };
  const double large = rate(16896, 8192, 8192);
  CHECK(large > 0.95 * kH100.product_flops_per_second);
  CHECK(large < kH100.product_flops_per_second);
  CHECK(rate(512, 512, 8192) < 0.2 * large);   // 16 tiles for 132 multiprocessors
  CHECK(rate(16896, 8192, 64) < 0.4 * large);  // more beginning and end than product
  CHECK(rate(16896, 8192, 8192, f32) < 0.1 * large);
  CHECK(rate(16896, 8192, 8192, e4m3) > 1.7 * large);  // by the same source
  const auto attention = [](std::int32_t length) {
    return product_rate(kH100, {.kind = Products::Kind::attention,
                                .dtype = bf16,
                                .batch = 32,
                                .m = length,
                                .n = length,
                                .k = 128});
  };
  // Measured on an H100, bench/results: two numbers fit three of its lengths.
  CHECK(std::abs(attention(1024) / 421e12 - 1) < 0.03);
  CHECK(std::abs(attention(4096) / 596e12 - 1) < 0.05);
  CHECK(std::abs(attention(8192) / 615e12 - 1) < 0.02);
}

TEST_CASE("on a machine collectives go one after another, and compute is slower beside them") {
  const Device device =
      Device::cpu({.executor = ExecutorKind::virtual_, .cost = {.machine = &kExact}});
  const auto launch = [](const Stream& stream, const Cost& cost) {
    stream.launch({.name = "work", .cost = cost}, [](Exec&) {});
  };
  const auto seconds = [&](StreamId stream) { return device.context().executor().seconds(stream); };
  const Cost collective{.wire_bytes = 96, .ranks = 2};  // 1 + 48 / 16 seconds
  launch(device.compute(), {.bytes = 128});             // 0 to 2, before any collective
  launch(device.gather(), collective);                  // 0 to 4
  launch(device.reduce(), collective);                  // 4 to 8, when the links are free
  CHECK(seconds(StreamId::compute) == 2);
  CHECK(seconds(StreamId::gather) == 4);
  CHECK(seconds(StreamId::reduce) == 8);
  launch(device.compute(), {.bytes = 64});  // 2 to 4: one second's work beside a collective
  CHECK(seconds(StreamId::compute) == 4);
  launch(device.compute(), {.bytes = 192});  // 4 to 8 two seconds' work, then one alone
  CHECK(seconds(StreamId::compute) == 9);
  launch(device.gather(), collective);       // 8 to 12
  launch(device.compute(), {.bytes = 256});  // 9 to 12 one and a half, then two and a half
  CHECK(seconds(StreamId::compute) == 14.5);
}

TEST_CASE("copies to the host take its link's time, and its own work that of its memory") {
  const Device device =
      Device::cpu({.executor = ExecutorKind::virtual_, .cost = {.machine = &kExact}});
  for (const StreamId stream : {StreamId::transfer, StreamId::offload, StreamId::compute})
    device.stream(stream).launch({.name = "work", .cost = {.bytes = 128}}, [](Exec&) {});
  const Executor& executor = device.context().executor();
  CHECK(executor.seconds(StreamId::transfer) == 8);  // 64 bytes, read here and written there
  CHECK(executor.seconds(StreamId::offload) == 4);
  CHECK(executor.seconds(StreamId::compute) == 2);
}
