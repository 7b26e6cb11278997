// Training on an emulated GPU: the CPU's bits, for any number of ranks and any delays of the
// streams; memory as planned; a steady step that asks the driver for nothing; failures and resets.
//
// The kernels are the CPU's and sums have one order, so equality is exact: what differs is what is
// above the driver table.
#include <stdexcept>

#include "runtime/device/testing.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/cuda/support.hpp"
#include "tests/distributed/exchange.hpp"
#include "tests/promises/memory.hpp"
#include "tests/promises/tiny_step.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("ranks on one GPU train with the CPU's bits, whatever the delays", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  Dice dice(seed);
  for (const Cell& cell : all_cells())
    if (share.takes()) {
      std::vector<int> worlds = worlds_of(cell);
      const int ranks = dice.once_in(8) ? 8 : dice.of(worlds);
      INFO(cell << ", " << ranks << " ranks, seed " << seed);
      const Trained cpu = train(ranks, {.threads = 1}, cell, seed, 3);
      CHECK(cpu.losses.back() < cpu.losses.front());
      CHECK(same_bits(cpu, train(ranks, on_gpu(), cell, seed, 3)));
      const auto late = on_ranks(ranks, on_gpu(), [&](World& world) {
        delay_operations(world.device().context(), seed | 1);
        return train(world, cell, seed, 3);
      });
      for (const Trained& each : late) CHECK(same_bits(cpu, each));
      const Delays delays(seed, 60);
      CHECK(same_bits(cpu, train(ranks, on_gpu(), cell, seed, 3)));
    }
}

TEST_CASE("every configuration of schedules has the CPU's bits on a GPU", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const TinyConfig& config : kTinyConfigs) {
    if (!share.takes()) continue;
    INFO(config.name << ", seed " << seed);
    const TinyRun cpu = train(config, {.threads = 1}, seed);
    const Delays delays(seed, 60);
    CHECK(difference(cpu, train(config, on_gpu(), seed)).empty());
  }
}

namespace {

// Two matrices that are gathered in e4m3 around a frozen one that is stored in it.
struct Stored8 final : nn::Module {
  Stored8() : base({6, 5}, Initializer::normal(0, 0.5)) {
    register_modules("in", in, "out", out);
    register_parameter("base", base);
    base.freeze();
    base.set_dtype(e4m3);
    for (nn::Linear* const layer : {&in, &out})
      layer->weight.set_gather_transform(gather_in_e4m3());
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& h) { return out(tanh(linear(tanh(in(h)), cast(base, h.dtype())))); }, x);
  }
  nn::Linear in{4, 5}, out{6, 3};
  Parameter base;
};

}  // namespace

TEST_CASE("what is stored and gathered in 8 bits has the CPU's bits on a GPU", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const DType param : {f32, bf16})
    for (const int ranks : {1, 2, 3}) {
      INFO(param << ", " << ranks << " ranks");
      const auto run = [&](const WorldOptions& options, bool delays) {
        return on_ranks(ranks, options, [&](World& world) {
          if (delays) delay_operations(world.device().context(), seed | 1);
          Stored8 model;
          const ShardOptions shard_options{.mesh = DeviceMesh::flat(world),
                                           .precision = {.param = param}};
          for (nn::Linear* const layer : {&model.in, &model.out})
            fully_shard(*layer, shard_options);
          fully_shard(model, shard_options);
          nn::init(model, {3}, world.device());
          optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
          for (int k = 0; k < 4; ++k) {
            mean_square(cast(model(rows_of(static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 4,
                                           world.device())),
                             f32))
                .backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          return full_values(model);
        });
      };
      const auto cpu = run({.threads = 1}, false);
      for (const bool delays : {false, true}) {
        const auto gpu = run(on_gpu(), delays);
        for (std::size_t rank = 0; rank < cpu.size(); ++rank)
          CHECK(same_bits(cpu[rank], gpu[rank]));
      }
    }
}

TEST_CASE("Muon has the CPU's bits on a GPU, where steps are skipped and matrices frozen, too",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  struct Taken {
    Values first, last;
    std::int64_t steps = 0;
  };
  for (const HybridSizes sizes :
       {HybridSizes{1, 1}, HybridSizes{1, 2}, HybridSizes{1, 4}, HybridSizes{2, 2}})
    for (const DType ns_dtype : {f32, bf16}) {
      INFO(sizes.replicate << " replicas of " << sizes.shard << " ranks, in " << ns_dtype
                           << ", seed " << seed);
      const auto run = [&](const WorldOptions& options, bool delays) {
        return on_ranks(sizes.replicate * sizes.shard, options, [&](World& world) {
          if (delays) delay_operations(world.device().context(), seed | 1);
          Stack model({4, 6, 5, 3});
          model.shard({.mesh = DeviceMesh::hybrid(world, sizes)});
          nn::init(model, {seed}, world.device());
          const Parameter& frozen = model.layers[1].weight;
          frozen.freeze();
          const auto [matrices, others] = optim::split_for_muon(model.parameters());
          optim::Muon optimizer(matrices, others,
                                {.lr = 0.05, .ns_dtype = ns_dtype, .turn_bytes = 64});
          optim::GradScaler scaler(world.device(), {.init_scale = 4});
          Taken taken{.first = full_values(model), .last = {}};
          for (int k = 0; k < 5; ++k) {
            const Tensor x = rows_of(seed + static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 4,
                                     world.device());
            scaler.scale(mean_square(model(x))).backward();
            if (k == 1 && world.rank() == 0) spoil_gradient(model, INFINITY);
            scaler.step(optimizer);
            scaler.update();
            optimizer.zero_grad();
            frozen.set_trainable(k == 2);  // for a step
          }
          taken.last = full_values(model);
          taken.steps = optimizer.steps();
          return taken;
        });
      };
      const auto cpu = run({.threads = 1}, false);
      for (const auto& [name, values] : cpu[0].last)
        CHECK(!same_bits(values, cpu[0].first.at(name)));
      for (const bool delays : {false, true})
        for (const Taken& gpu : run(on_gpu(), delays)) {
          CHECK(gpu.steps == 4);
          CHECK(same_bits(gpu.last, cpu[0].last));
        }
    }
}

TEST_CASE("sub-meshes, backwards left out and every norm have the CPU's bits on a GPU",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  struct Taken {
    std::vector<float> norms;
    Values last;
  };
  constexpr double kMost = 1e-4;  // less than any norm here, so that all are clipped
  for (const bool is_hybrid : {false, true})
    for (const auto type : {optim::NormType::l1, optim::NormType::l2, optim::NormType::inf})
      for (const auto clip : {optim::Clip::in_place, optim::Clip::in_optimizer}) {
        INFO((is_hybrid ? "2 replicas" : "2 groups by themselves")
             << " of 2 ranks, norm " << static_cast<int>(type) << ", clip "
             << static_cast<int>(clip) << ", seed " << seed);
        const auto run = [&](const WorldOptions& options, bool delays) {
          return on_ranks(4, options, [&](World& world) {
            if (delays) delay_operations(world.device().context(), seed | 1);
            const DeviceMesh grid = DeviceMesh::grid(
                world, {{.name = "rows", .size = 2}, {.name = "columns", .size = 2}});
            Stack model({4, 6, 5, 3});
            model.shard({.mesh = is_hybrid ? grid : grid["rows"]});
            nn::init(model, {seed}, world.device());
            optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
            Taken taken;
            for (int k = 0; k < 4; ++k) {
              const Tensor x = rows_of(seed + static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 4,
                                       world.device());
              const Tensor loss = mean_square(model(x));
              // Ranks 1, 2 and 3, in a step each.
              k > 0 && k == world.rank() ? skip_backward(loss) : loss.backward();
              const Tensor norm = optim::clip_grad_norm(model.parameters(), kMost, type, clip);
              taken.norms.push_back(static_cast<float>(norm.item()));
              optimizer.step();
              optimizer.zero_grad();
            }
            taken.last = full_values(model);
            return taken;
          });
        };
        const auto cpu = run({.threads = 1}, false);
        for (const bool delays : {false, true}) {
          const auto gpu = run(on_gpu(), delays);
          for (std::size_t rank = 0; rank < 4; ++rank) {
            for (const float norm : cpu[rank].norms) CHECK(norm > kMost);
            CHECK(same_bits(gpu[rank].norms, cpu[rank].norms));
            CHECK(same_bits(gpu[rank].last, cpu[rank].last));
          }
        }
      }
}

TEST_CASE("the planned peak of a GPU is the measured one, on every rank and step", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  Dice dice(seed);
  GridShare share;
  std::vector<Cell> all = all_cells();
  all.push_back({.orthogonalises = true});
  for (const Cell& cell : all)
    for (const CudaMemory memory : {CudaMemory::pieces, CudaMemory::mapped})
      if (share.takes()) {
        std::vector<int> worlds = worlds_of(cell);
        const int ranks = dice.of(worlds);
        INFO(cell << ", " << ranks << " ranks, seed " << seed);
        const auto measured =
            on_ranks(ranks, on_gpu(memory), [&](World& world) { return measure(world, cell); });
        for (int rank = 0; rank < ranks; ++rank) {
          const World plan =
              World::emulated(rank, ranks,
                              {.device = {.kind = DeviceKind::cuda, .memory = memory},
                               .executor = ExecutorKind::virtual_});
          const Phases planned = measure(plan, cell);
          CHECK(planned == measured[static_cast<std::size_t>(rank)]);
          CHECK(planned.steps[0].peak > kWorkspaceBytes);
        }
      }
}

TEST_CASE("a steady step makes nothing on the device, and its host blocks where it reads",
          "[threads]") {
  for (const int ranks : {1, 2}) {
    INFO(ranks << " ranks");
    struct Around {
      Counts before{}, after{};
      std::uint64_t gates = 0;
    };
    constexpr int kSteady = 5;
    const auto seen = on_ranks(ranks, on_gpu(), [&](World& world) {
      Trainee trainee(world, {}, 5);
      const auto read = [&](int k) { return trainee.step(k).loss.item(); };
      for (int k = 0; k < 3; ++k) read(k);
      Around around;
      world.barrier();
      const std::uint64_t gates = trainee.memory().pool().gates_fired();
      around.before = counts();
      world.barrier();
      for (int k = 3; k < 3 + kSteady; ++k) read(k);
      world.barrier();
      around.after = counts();
      world.barrier();
      around.gates = trainee.memory().pool().gates_fired() - gates;
      return around;
    });
    const Counts &before = seen[0].before, &after = seen[0].after;
    CHECK(after.allocations == before.allocations);
    CHECK(after.host_allocations == before.host_allocations);
    CHECK(after.mappings == before.mappings);
    CHECK(after.events == before.events);
    CHECK(after.streams == before.streams);
    // One read a step and the three barriers around the two counts, on each rank; one more in each
    // step of one rank would be beyond it.
    CHECK(after.blocks - before.blocks <= ranks * kSteady + 2 * ranks + ranks - 1);
    for (const Around& around : seen) CHECK(around.gates == 0);
  }
}

TEST_CASE("a rank on a GPU that throws is named to its peers, and after a reset all train on",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const bool in_a_kernel = GENERATE(false, true);
  const Cell cell{.offload = GENERATE(Offload::none, Offload::cpu)};
  const Trained undisturbed = train(2, on_gpu(), cell, seed, 2);
  std::vector<std::string> heard(2);
  const auto after = on_ranks(2, on_gpu(), [&](World& world) {
    Trainee trainee(world, cell, seed);
    try {
      trainee.backward(7, 0);
      if (world.rank() == 1 && !in_a_kernel) throw std::runtime_error("no luck");
      if (world.rank() == 1)
        world.device().compute().launch({.name = "unlucky"},
                                        [](Exec& exec) { exec.error = "no luck"; });
      trainee.backward(8, 0);
      world.device().synchronize();
    } catch (const std::exception&) {
      heard[static_cast<std::size_t>(world.rank())] = reset(trainee.model()).cause;
    }
    trainee.optimizer().zero_grad();
    return train(world, trainee, 2);
  });
  for (const std::string& why : heard)
    CHECK_THAT(why, Catch::Contains("rank 1") && Catch::Contains("no luck"));
  for (const Trained& trained : after) CHECK(same_bits(trained, undisturbed));
}

TEST_CASE("a GPU that is full says so on the rank that asked, with its ledger", "[threads]") {
  emulator().limit_memory(2 * kWorkspaceBytes + (6ll << 20));
  std::string what;
  try {
    run_local(2, on_gpu(), [](World& world) {
      Trainee trainee(world, {}, 1);
      for (int k = 0; k < 3; ++k) trainee.step(k);
      const Tensor large = Tensor::ones({8 << 20}, f32, world.device());
    });
  } catch (const OutOfMemory& error) {
    what = error.what();
  }
  emulator().limit_memory(0);
  CHECK_THAT(what, Catch::Contains("33554432 bytes for 'activations'") &&
                       Catch::Contains("workspace") && Catch::Contains("use more ranks"));
}

TEST_CASE("one rank of many on a GPU, without peers, has the CPU's bits", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto bits = [&](const WorldOptions& options) {
    const RaceCheck check;
    World world = World::emulated(1, 3, check(options));
    Trainee trainee(world, {}, seed);
    std::vector<float> losses;
    for (int k = 0; k < 3; ++k) losses.push_back(static_cast<float>(trainee.step(k).loss.item()));
    return losses;
  };
  CHECK(same_bits(bits({.threads = 1}), bits(on_gpu())));
}

TEST_CASE("freed memory of a GPU is poisoned and nobody reads it", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Delays delays(seed, 60);
  const Cell cell{.param = bf16, .reduce = bf16, .offload = GENERATE(Offload::none, Offload::cpu)};
  const auto poisoned = on_ranks(2, on_gpu(), [&](World& world) {
    Memory::of(world.device()).poison_freed();
    return train(world, cell, seed, 2);
  });
  CHECK(same_bits(poisoned[0], train(2, {.threads = 1}, cell, seed, 2)));
}

TEST_CASE("collectives on tensors of a GPU give every rank what the ranks' tensors make",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 3, 4}) {
    const Delays delays(seed, 20);
    for (const auto& of_rank :
         on_ranks(ranks, on_gpu(), [](World& world) { return exchange::errors(world); }))
      for (const std::string& error : of_rank) FAIL_CHECK(error);
  }
  for (const auto& of_rank :
       on_ranks(2, on_gpu(), [](World& world) { return exchange::errors_of_pieces(world); }))
    for (const std::string& error : of_rank) FAIL_CHECK(error);
}
