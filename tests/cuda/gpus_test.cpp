// Ranks on GPUs of their own, all in one process: which rank is where, that they train with the
// bits of ranks on one GPU, and that what a GPU would refuse is refused, so that these tests see a
// wrong device.
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/cuda/support.hpp"
#include "tests/promises/memory.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

WorldOptions on_first_gpu() {
  WorldOptions options = on_gpu();
  options.device.index = 0;
  return options;
}

std::vector<std::string> lines_of_world(int ranks, const WorldOptions& options) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& message) { lines.push_back(message); });
  run_local(ranks, options, [](World&) {});
  set_log_sink({});
  return lines;
}

// The sums of `count` elements of all ranks, the rank's own in the result's place.
std::vector<float> summed(World& world, std::int64_t count) {
  std::vector<float> mine(static_cast<std::size_t>(count * world.size()));
  for (std::size_t i = 0; i < mine.size(); ++i)
    mine[i] = static_cast<float>(i % 1009) * static_cast<float>(world.rank() + 1);
  const Tensor all = Tensor::from(mine, {count * world.size()}, world.device());
  const Tensor sum = Tensor::empty({count}, f32, world.device());
  world.device().reduce().wait(world.device().compute().record());
  const Access accesses[] = {all.access(AccessMode::read), sum.access(AccessMode::write)};
  world.reduce().submit({.send = all.data(),
                         .recv = sum.data(),
                         .count = count,
                         .kind = CollectiveKind::reduce_scatter,
                         .dtype = f32},
                        "sum_values", accesses);
  world.device().compute().wait(world.device().reduce().record());
  return sum.to_vector<float>();
}

}  // namespace

TEST_CASE("rank r is on GPU r where there are as many, and one line says so", "[threads]") {
  const auto used = [](int gpu) { return emulator().used(gpu) > 0; };
  struct Case {
    int ranks, gpus;
    bool reach;
    const char* line;
  };
  for (const Case& c :
       {Case{2, 2, true, "cuda: rank r of 2 is on GPU r; each reads its peers' memory"},
        Case{2, 4, false, "GPU 0 can't read GPU 1"},
        Case{4, 2, true, "cuda: 4 ranks share GPU 0, because there are 2 GPUs"},
        Case{2, 1, true, "cuda: 2 ranks share GPU 0, because there is 1 GPU"}}) {
    INFO(c.ranks << " ranks, " << c.gpus << " GPUs");
    const Gpus gpus(c.gpus, c.reach);
    const std::vector<std::string> lines = lines_of_world(c.ranks, on_gpu());
    REQUIRE(lines.size() == 1);
    CHECK_THAT(lines[0], Catch::Contains(c.line));
    std::array<std::atomic<bool>, 4> seen{};
    run_checked(c.ranks, on_gpu(), [&](World& world) {
      world.barrier();
      for (int gpu = 0; gpu < 4; ++gpu)
        if (used(gpu)) seen[static_cast<std::size_t>(gpu)] = true;
      world.barrier();
    });
    for (int gpu = 0; gpu < 4; ++gpu)
      CHECK(seen[static_cast<std::size_t>(gpu)] == (gpu < (c.gpus < c.ranks ? 1 : c.ranks)));
  }
  const Gpus gpus(2);
  CHECK(lines_of_world(2, on_first_gpu()).empty());
  CHECK(lines_of_world(1, on_gpu()).empty());
}

TEST_CASE("ranks on GPUs of their own train with the bits of one GPU", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  const std::vector<Cell> tried = {
      {},
      {.recomputes = true, .freezes = true, .micro_batches = 3},
      {.param = bf16, .reduce = bf16},
      {.micro_batches = 3, .replicas = 2, .accumulation = Accumulation::in_replicas},
      {.micro_batches = 3, .param = bf16, .offload = Offload::cpu}};
  GridShare share;
  for (const Cell& cell : tried)
    for (const int ranks : share.of({2, 4})) {
      const Trained one = train(ranks, on_first_gpu(), cell, seed, 3);
      CHECK(one.losses.back() < one.losses.front());
      for (const bool reach : {true, false})
        for (const CudaMemory memory : {CudaMemory::pieces, CudaMemory::mapped}) {
          INFO(cell << ", " << ranks << " ranks, seed " << seed << ", reach " << reach
                    << ", mapped " << (memory == CudaMemory::mapped));
          const Gpus gpus(ranks, reach);
          const Delays delays(seed, 60);
          CHECK(same_bits(one, train(ranks, on_gpu(memory), cell, seed, 3)));
          for (int gpu = 0; gpu < ranks; ++gpu) CHECK(emulator().used(gpu) == 0);
        }
    }
}

TEST_CASE("sums of copies are as long as they must be, and have the same bits", "[threads]") {
  for (const int ranks : {2, 3})
    for (const std::int64_t count : {1, 1'000, 1'500'001}) {  // 4 MiB of copies at a time
      INFO(ranks << " ranks, " << count << " elements");
      const auto sums = [&](bool reach) {
        const Gpus gpus(ranks, reach);
        return on_ranks(ranks, on_gpu(), [&](World& world) { return summed(world, count); });
      };
      const auto read = sums(true), copied = sums(false);
      CHECK(read == copied);
      for (std::size_t rank = 0; rank < read.size(); ++rank) {
        const auto last = static_cast<std::size_t>(count) - 1;
        const auto at = (rank * static_cast<std::size_t>(count) + last) % 1009;
        CHECK(read[rank][last] ==
              static_cast<float>(at) * static_cast<float>(ranks * (ranks + 1) / 2));
      }
    }
}

TEST_CASE("each GPU has its rank's plan to the byte, and a limit of its own", "[threads]") {
  for (const bool reach : {true, false}) {
    INFO("reach " << reach);
    const Gpus gpus(2, reach);
    const auto measured =
        on_ranks(2, on_gpu(), [](World& world) { return measure(world, Cell{}); });
    for (int rank = 0; rank < 2; ++rank) {
      const World plan = World::emulated(
          rank, 2, {.device = {.kind = DeviceKind::cuda}, .executor = ExecutorKind::virtual_});
      CHECK(measure(plan, Cell{}).steps == measured[static_cast<std::size_t>(rank)].steps);
    }
  }
  const auto trains = [] { train(2, on_gpu(), Cell{}, 5, 1); };
  emulator().limit_memory(kWorkspaceBytes + (12ll << 20));
  CHECK_THROWS_AS(trains(), OutOfMemory);  // on one GPU, for both
  {
    const Gpus gpus(2);
    CHECK_NOTHROW(trains());
  }
  emulator().limit_memory(0);
}

TEST_CASE("copies of a grouped gather are one submission a rank", "[threads]") {
  const Gpus gpus(2);
  std::array<std::int64_t, 2> copies{}, batches{};
  run_checked(2, on_gpu(), [&](World& world) {
    constexpr std::int64_t kCount = 100;
    std::vector<Tensor> tables;
    std::vector<Collective> items;
    std::vector<Access> accesses;
    for (int i = 0; i < 6; ++i) {
      const Tensor& table = tables.emplace_back(Tensor::ones({2 * kCount}, f32, world.device()));
      items.push_back({.send = table.view({kCount}, {1}, world.rank() * kCount).data(),
                       .recv = table.data(),
                       .count = kCount,
                       .kind = CollectiveKind::all_gather,
                       .dtype = f32});
      accesses.push_back(table.access(AccessMode::write));
    }
    const CollectiveGroup group("gather_tables", items);
    world.device().gather().wait(world.device().compute().record());
    world.device().synchronize();
    world.barrier();
    const Counts before = counts();
    world.barrier();
    world.gather().submit(group, accesses);
    world.device().block(world.device().gather().record());
    world.barrier();
    copies[static_cast<std::size_t>(world.rank())] = counts().copies - before.copies;
    batches[static_cast<std::size_t>(world.rank())] = counts().batches - before.batches;
    world.barrier();
  });
  CHECK(copies[0] >= 12);
  CHECK(batches[0] <= 2 + 2 * 4);  // and the barriers' own, of at most two phases
}

TEST_CASE("a wrong device is refused: stream, event, or memory that is out of reach", "[threads]") {
  for (const bool reach : {true, false}) {
    const Gpus gpus(2, reach);
    const Device near = queued_gpu(),
                 far = Device::cuda({.index = 1, .module = TESSERA_QUEUED_MODULE});
    const Driver& driver = *near.context().driver();
    const Tensor theirs = Tensor::ones({4}, f32, far), mine = Tensor::ones({4}, f32, near);
    far.synchronize();
    near.synchronize();
    const auto thrown_by = [&](const auto& body) -> std::string {
      near.compute().launch({.name = "stray"}, body);
      try {
        near.synchronize();
      } catch (const DeviceError& error) {
        near.context().recover();
        return error.what();
      }
      return "";
    };
    const auto add = [to = mine.data(), from = theirs.data()](Exec& exec) {
      const void* const inputs[] = {to, from};
      kernels::kernels_of(exec.driver)
          .reduce_peers({to, inputs, 4, 2, f32, kernels::PeersOp::sum}, exec);
    };
    CHECK_THAT(thrown_by(add), Catch::Contains("does not reach"));  // nobody has asked for it yet
    bool reaches = false;
    CHECK(driver.reach(0, 1, &reaches) == nullptr);
    CHECK(reaches == reach);
    CHECK((thrown_by(add).find("does not reach") == std::string::npos) == reach);
    CHECK_THAT(thrown_by([](Exec& exec) {  // the mutant: the thread is on the other device
                 exec.driver->use(1);
                 exec.error = exec.driver->delay(1, exec.native_stream);
               }),
               Catch::Contains("a stream of another device"));
    void *event = nullptr, *stream = nullptr;
    driver.use(1);
    driver.make_event(&event);
    driver.use(0);
    driver.make_stream(0, &stream);
    CHECK_THAT(std::string(driver.record(event, stream)), Catch::Contains("an event of another"));
    driver.end_event(event);
    driver.end_stream(stream);
  }
}
