// What a unit's collectives cost the host over NCCL, beside ranks as threads of one process: on the
// same emulated GPUs, and with the double in the place of NCCL.
#include <ctime>

#include <algorithm>
#include <iostream>
#include <limits>

#include "tests/comm/nccl_worlds.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Of the calling thread alone: what it sleeps for, or others compute, does not count.
double thread_us() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

// A gather and a reduction of a block of a transformer: 9 parameters, each an item. The least of
// all rounds, a unit.
double unit_us(World& world, DType dtype) {
  constexpr int kParameters = 9, kUnits = 10, kRounds = 200;
  constexpr std::int64_t kCount = 256;
  const std::int64_t items = kParameters * kCount, size = world.size();
  const auto memory = world.allocate_symmetric(4 * items * (2 * size + 1));
  auto* const data = reinterpret_cast<float*>(memory->data());
  std::fill_n(data, items * (2 * size + 1), 1.0f);
  std::vector<Collective> gathers, sums;
  for (int i = 0; i < kParameters; ++i) {
    float *const whole = data + i * kCount * size, *const gradient = whole + items * size;
    gathers.push_back({.send = whole + world.rank() * kCount,
                       .recv = whole,
                       .count = kCount,
                       .kind = CollectiveKind::all_gather});
    sums.push_back({.send = gradient,
                    .recv = data + 2 * items * size + i * kCount,
                    .count = kCount,
                    .kind = CollectiveKind::reduce_scatter,
                    .dtype = dtype});
  }
  const CollectiveGroup gather("gather", gathers), reduce("reduce", sums);
  LastUse gathered, reduced;
  const Access of_gather[] = {{&gathered, data, data + items * size, AccessMode::write}},
               of_reduce[] = {{&reduced, data + items * size, data + items * (2 * size + 1),
                               AccessMode::write}};
  double least = std::numeric_limits<double>::max();
  for (int round = 0; round < kRounds; ++round) {
    world.barrier();
    const double begin = thread_us();
    for (int unit = 0; unit < kUnits; ++unit) {
      world.gather().submit(gather, of_gather);
      world.reduce().submit(reduce, of_reduce);
    }
    least = std::min(least, (thread_us() - begin) / kUnits);
    world.device().synchronize();
  }
  return least;
}

}  // namespace

// f32 is summed by NCCL, bf16 exchanged and folded. What runs beside only adds to either, so the
// least of several turns counts.
TEST_CASE("nccl: a unit's collectives cost the host no more than those of threads do") {
  for (const DType dtype : {f32, bf16}) {
    double of_threads = std::numeric_limits<double>::max(), of_nccl = of_threads;
    const auto keep_least = [&](World& world, double& least) {
      const double us = world.max(unit_us(world, dtype));
      if (world.rank() == 0) least = std::min(least, us);
      return std::string();
    };
    for (int turn = 0; turn == 0 || (turn < 5 && of_nccl > of_threads); ++turn) {
      {
        const Gpus gpus(2);
        WorldOptions options = over_the_double({}, 0);
        options.device.index.reset();
        run_local(2, options, [&](World& world) { keep_least(world, of_threads); });
      }
      for (const std::string& said :
           nccl_threads(2, [&](World& world) { return keep_least(world, of_nccl); }))
        CHECK(said == "");
    }
    std::cout << "  host time of a unit's gather and reduction of " << name(dtype) << ": threads "
              << of_threads << " us, over the double of NCCL " << of_nccl
              << " us: " << of_nccl / of_threads << " times\n";
    CHECK(of_nccl <= of_threads);
  }
}
