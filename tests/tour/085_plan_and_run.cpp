// Lesson 85: plan and run.
//
// How much memory will a step need, on how many ranks? Nothing here estimates it. The plan is the
// program itself, on an executor that runs no bodies: every allocation, gather and free is made as
// in a run, over memory that is counted and never touched.
//
//   plan   World::emulated, virtual executor    one process is any rank of any number; 0 bytes
//          shard_plan(model, step)              the same, beside the model that is to run it
//   run    run_local, threads                   the same calls in the same order: the same peak
//
// They agree to the byte, because what memory is reused depends on the order of the host program
// alone, and on nothing that happens while it runs. So the plan of a job of 512 ranks takes a
// second on a laptop, and a job that does not fit is refused before it starts: the plan's peak is
// compared with the memory of a device.
//
// PyTorch: memory is estimated by tracking tensors under FakeTensorMode (MemTracker), which counts
// live bytes. What the caching allocator reserves beyond them shows in a run, on the GPU.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

class Mlp : public ts::nn::Module {
 public:
  Mlp() : up(256, 1024), down(1024, 256) {
    register_module("up", up);
    register_module("down", down);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return down(ts::tanh(up(x))); });
  }
  ts::nn::Linear up, down;
};

struct Bytes {
  std::int64_t live, reserved;  // at the peak of a step; taken from the system
  bool operator==(const Bytes&) const = default;
};

// Two steps on this rank's `rows` rows. It does not know whether it is a plan.
static Bytes train(const ts::World& world, std::int64_t rows, std::string* table = nullptr) {
  Mlp mlp;
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
  ts::fully_shard(mlp.up, options);
  ts::fully_shard(mlp.down, options);
  ts::fully_shard(mlp, options);
  mlp.materialize(world.device());
  ts::nn::init(mlp, {.value = 7});
  ts::optim::AdamW optimizer(mlp.parameters(), {.lr = 1e-3});
  ts::Memory& memory = ts::Memory::of(world.device());
  for (int step = 0; step < 2; ++step) {
    memory.ledger().reset_peak();
    const ts::Tensor y = mlp(ts::Tensor::full({rows, 256}, 0.5, ts::f32, world.device()));
    ts::mean(y * y).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  world.device().synchronize();
  if (table) *table = memory.ledger().table();
  return {memory.ledger().peak_bytes(), memory.reserved_bytes()};
}

static Bytes plan(int rank, int ranks, std::int64_t rows, std::string* table = nullptr) {
  const ts::World world =
      ts::World::emulated(rank, ranks, {.executor = ts::ExecutorKind::virtual_});
  return train(world, rows, table);
}

static void a_run_needs_what_was_planned() {
  constexpr int kRanks = 3;
  std::vector<Bytes> measured(kRanks);
  ts::run_local(kRanks, {}, [&](ts::World& world) {
    measured[static_cast<std::size_t>(world.rank())] = train(world, 64);
  });
  std::cout << "1. Three ranks, 64 rows each:\n";
  for (int rank = 0; rank < kRanks; ++rank) {
    const Bytes planned = plan(rank, kRanks, 64), used = measured[static_cast<std::size_t>(rank)];
    std::cout << "   rank " << rank << ": planned " << planned.live << " bytes, used " << used.live
              << "; reserved " << planned.reserved << " and " << used.reserved << '\n';
    CHECK(planned == used);
  }
}

static void how_many_ranks() {
  std::cout << "2. 4096 rows a rank, planned:";
  std::int64_t before = 0;
  for (const int ranks : {1, 8, 64, 512}) {
    const std::int64_t live = plan(0, ranks, 4096).live;
    std::cout << (before > 0 ? ", " : " ") << live / 1024 << " KiB on " << ranks;
    CHECK(before == 0 || live < before);
    before = live;
  }
  std::cout << '\n';
}

static void what_it_is_made_of() {
  std::string table;
  const Bytes whole = plan(0, 512, 4096, &table), half = plan(0, 512, 2048);
  std::cout << "3. On 512 ranks nearly all of it is activations:\n" << table;
  CHECK(whole.live < 2 * half.live);  // slots and shards do not grow with the batch
  CHECK(whole.live > half.live);
}

// Down runs twice: a first step that nobody has planned takes slots where there is room.
static std::shared_ptr<Mlp> twice(ts::World& world) {
  auto mlp = std::make_shared<Mlp>();
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
  ts::fully_shard(mlp->up, options);
  ts::fully_shard(mlp->down, options);
  ts::fully_shard(*mlp, options);
  mlp->materialize(world.device());
  return mlp;
}
static void step(Mlp& mlp, const ts::Tensor& x) {
  ts::mean(mlp.call([&] {
    return mlp.down(ts::tanh(mlp.up(mlp.down(ts::tanh(mlp.up(x))))));
  })).backward();
}

static void a_first_step_as_all_others() {
  std::cout << "4. Slots where no plan had them, in the first step and in all of three:\n";
  for (const bool is_planned : {false, true})
    ts::run_local(2, {}, [&](ts::World& world) {
      const std::shared_ptr<Mlp> mlp = twice(world);
      ts::nn::init(*mlp, {.value = 7});
      if (is_planned)
        ts::shard_plan(*mlp, [](ts::World& counted) {
          std::shared_ptr<Mlp> planned = twice(counted);
          step(*planned, ts::Tensor::empty({64, 256}, ts::f32, counted.device()));
          return planned;
        });
      std::uint64_t first = 0, all = 0;
      for (int k = 0; k < 3; ++k) {
        step(*mlp, ts::Tensor::full({64, 256}, 0.5, ts::f32, world.device()));
        all = ts::shard_counters(*mlp).unplanned_slots;
        if (k == 0) first = all;
      }
      if (world.rank() == 0)
        std::cout << "   " << (is_planned ? "shard_plan(mlp, step): " : "without a plan: ") << first
                  << " and " << all << '\n';
      CHECK((first == 0) == is_planned);
      CHECK(all == first);
    });
}

int main() {
  a_run_needs_what_was_planned();
  how_many_ranks();
  what_it_is_made_of();
  a_first_step_as_all_others();
}
