// Memory of an emulated GPU: pieces and mapping, its end, pinned staging, and the plan.
#include <random>
#include <vector>

#include "kernels/attention.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::counts;
using tessera::testing::emulator;
using tessera::testing::queued_gpu;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

// A random program of allocations, the same for a run and its plan.
void allocate_and_free(const Device& device, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  Memory& memory = Memory::of(device);
  std::vector<Buffer> live;
  for (int i = 0; i < 300; ++i) {
    if (!live.empty() && rng() % 2 == 0)
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(rng() % live.size()));
    live.push_back(memory.allocate(static_cast<std::int64_t>(1 + rng() % (4 * kMiB)),
                                   static_cast<StreamId>(rng() % 2)));
  }
}

}  // namespace

TEST_CASE("a plan of a GPU counts what the GPU reserves, for pieces and for mapping", "[threads]") {
  const CudaMemory kind = GENERATE(CudaMemory::pieces, CudaMemory::mapped);
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  const Device gpu = queued_gpu(0, kind);
  const Device plan = Device::cuda({.executor = ExecutorKind::virtual_, .memory = kind});
  allocate_and_free(gpu, seed);
  allocate_and_free(plan, seed);
  Memory &real = Memory::of(gpu), &planned = Memory::of(plan);
  CHECK(real.reserved_bytes() == planned.reserved_bytes());
  CHECK(real.ledger().peak_bytes() == planned.ledger().peak_bytes());
  CHECK(real.ledger().live_bytes("workspace") == kWorkspaceBytes);
  CHECK(planned.ledger().live_bytes() == kWorkspaceBytes);
}

TEST_CASE("backward of attention has its workspace from the pool, and the plan books it",
          "[threads]") {
  const auto peak = [](const Device& device, DType dtype) {
    const Tensor qkv = Tensor::full({2, 3, 6, 8}, 0.5, dtype, device).require_grad();
    const Tensor y = causal_attention(qkv, 1);
    const Tensor gradient = Tensor::ones(y.shape(), dtype, device);
    Ledger& ledger = Memory::of(device).ledger();
    const std::int64_t before = ledger.live_bytes();
    ledger.reset_peak();
    y.backward(gradient);
    device.synchronize();
    return ledger.peak_bytes() - before;
  };
  for (const bool deterministic : {true, false}) {
    const Device gpu = Device::cuda(
                     {.deterministic = deterministic, .module = TESSERA_QUEUED_MODULE}),
                 plan = Device::cuda(
                     {.executor = ExecutorKind::virtual_, .deterministic = deterministic});
    const std::int64_t bytes =
        kernels::attention_workspace_bytes(2, 3, 4, 1, 8, bf16, deterministic);
    CHECK(bytes > (deterministic ? 0 : 32 * kMiB));
    CHECK(peak(gpu, bf16) >= bytes);
    CHECK(peak(gpu, bf16) < bytes + kMiB);
    CHECK(peak(plan, bf16) == peak(gpu, bf16));
    CHECK(peak(gpu, f32) < kMiB);
  }
}

TEST_CASE("bodies on compute find the workspace, others none", "[threads]") {
  const Device device = queued_gpu();
  Memory::of(device);
  std::size_t on_compute = 0, on_gather = 1;
  std::size_t *const c = &on_compute, *const g = &on_gather;
  device.compute().launch({.name = "look"}, [c](Exec& exec) { *c = exec.workspace_bytes; });
  device.gather().launch({.name = "look"}, [g](Exec& exec) { *g = exec.workspace_bytes; });
  CHECK(on_compute == static_cast<std::size_t>(kWorkspaceBytes));
  CHECK(on_gather == 0);
}

TEST_CASE("a GPU without memory says so with the ledger, and goes on when there is more",
          "[threads]") {
  const CudaMemory kind = GENERATE(CudaMemory::pieces, CudaMemory::mapped);
  const Device device = queued_gpu(0, kind);
  Memory& memory = Memory::of(device);
  emulator().limit_memory(kWorkspaceBytes + 64 * kMiB);
  {
    const OwnerGuard guard(device, "weights");
    const Buffer weights = memory.allocate(32 * kMiB, StreamId::compute);
    try {
      const Buffer more = memory.allocate(64 * kMiB, StreamId::compute);
      FAIL("there is no such memory");
    } catch (const OutOfMemory& error) {
      CHECK_THAT(error.what(), Catch::Contains("weights") && Catch::Contains("workspace") &&
                                   Catch::Contains("make the batch"));
    }
    // What compute has freed goes back to the device for the sake of another stream.
    {
      const Buffer freed = memory.allocate(24 * kMiB, StreamId::compute);
    }
    CHECK(memory.allocate(24 * kMiB, StreamId::gather));
  }
  emulator().limit_memory(0);
  CHECK(memory.allocate(128 * kMiB, StreamId::compute));
}

TEST_CASE("all that a GPU gave goes back to it", "[threads]") {
  const CudaMemory kind = GENERATE(CudaMemory::pieces, CudaMemory::mapped);
  std::int64_t free_before = 0, free_after = 0, total = 0;
  const Driver* driver = nullptr;
  {
    const Device device = queued_gpu(0, kind);
    driver = device.context().driver();
    REQUIRE(driver->memory_info(&free_before, &total) == nullptr);
    allocate_and_free(device, 1);
    CHECK(Tensor::ones({1}, f32, device).item() == 1);
  }
  REQUIRE(driver->memory_info(&free_after, &total) == nullptr);
  CHECK(free_after == free_before);
}

TEST_CASE("values go to a GPU and back through pinned memory, which is used again", "[threads]") {
  const tessera::testing::Delays delays(testing::fresh_seed(), 300);
  const Device device = queued_gpu();
  std::vector<float> values(5000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto round_trip = [&] {
    const Tensor there = Tensor::from(values, {50, 100}, device);
    CHECK(raw::transpose(there, 0, 1).to_vector<float>()[1] == 100);
    CHECK(there.to_vector<float>() == values);
  };
  round_trip();
  const auto before = counts();
  for (int i = 0; i < 5; ++i) {
    for (float& v : values) v += 1;
    const Tensor there = Tensor::from(values, {5000}, device);
    CHECK(there.to_vector<float>() == values);
  }
  const auto after = counts();
  CHECK(after.host_allocations == before.host_allocations);
  CHECK(after.allocations == before.allocations);
  CHECK(after.blocks - before.blocks == 5);
}

TEST_CASE("large values come back in pieces") {
  const Device device = queued_gpu();
  const Tensor big = Tensor::arange((5ll << 20) + 3, f32, device);  // 20 MiB and a little
  const std::vector<float> values = big.to_vector<float>();
  for (const std::size_t i : {std::size_t{0}, (std::size_t{4} << 20) - 1, std::size_t{4} << 20,
                              (std::size_t{5} << 20) + 2})
    CHECK(values[i] == static_cast<float>(i));
}

TEST_CASE("freed memory of a GPU is poisoned by its fill", "[threads]") {
  const Device device = queued_gpu();
  Memory::of(device).poison_freed();
  const auto before = counts();
  const Tensor fresh = Tensor::empty({4}, f32, device);
  const float read = fresh.to_vector<float>()[0];
  CHECK_FALSE(read == read);
  CHECK(counts().fills > before.fills);
}

TEST_CASE("operands on a GPU and on the CPU are refused in one line") {
  const Device gpu = queued_gpu();
  const Tensor a = Tensor::ones({2, 2}, f32, gpu), b = Tensor::ones({2, 2}, f32, Device::cpu());
  CHECK_THROWS_WITH(raw::matmul(a, b),
                    Catch::Contains("operands lie on different devices; move them to one"));
}
