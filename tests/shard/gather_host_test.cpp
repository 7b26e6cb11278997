// Shards, gradients, moments and the optimizer's step on the host: the same bits as on the device,
// in every way to train, and a device that holds none of them.
#include <algorithm>
#include <stdexcept>

#include "tessera/device/device_context.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/promises/support.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/offload_job.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

std::unique_ptr<optim::Optimizer> optimizer_of(const Stack& stack, bool is_adamw) {
  if (is_adamw) return std::make_unique<optim::AdamW>(stack.parameters());
  return std::make_unique<optim::SGD>(stack.parameters(),
                                      optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
}

std::int64_t live(const Memory& memory, const char* owner) {
  return const_cast<Memory&>(memory).ledger().live_bytes(owner);
}

// Three steps, and the gradients of one more: the same bits on the host as on the device.
void check_on_host(bool is_adamw, DType param, DType reduce, int ranks, int replicas,
                   optim::NormType type, int micro_batches) {
  CAPTURE(is_adamw, param, reduce, ranks, replicas, micro_batches, static_cast<int>(type));
  const auto run = [&](Offload offload) {
    return on_ranks(ranks, [&](World& world) {
      OffloadJob job(world, offload, param, reduce, replicas);
      const auto optimizer = optimizer_of(job.stack, is_adamw);
      OffloadRun left;
      for (int k = 0; k < 3; ++k)
        left.norms.push_back(job.step(k, *optimizer, micro_batches, type));
      job.loss(40).backward();
      left.gradients = shard_gradients(job.stack);
      left.parameters = full_values(job.stack);
      return left;
    });
  };
  const auto device = run(Offload::none), host = run(Offload::cpu);
  for (std::size_t rank = 0; rank < host.size(); ++rank) CHECK(same_bits(device[rank], host[rank]));
}

}  // namespace

TEST_CASE("a training on the host gives the bits of one on the device, in every way to train",
          "[threads][fsdp2-033]") {
  std::vector<Cell> all = all_cells();
  GridShare share;
  for (Cell cell : all)
    for (const int ranks : share.of({1, 2, 4})) {
      // One rank adds its gradients in the product that makes them, where nothing is offloaded.
      if (ranks == 1 && (cell.micro_batches > 1 || cell.tied)) continue;
      cell.ignores = false;  // refused beside what is offloaded
      INFO(cell << ", " << ranks << " ranks");
      const auto run = [&](Offload offload, const ExecutorChoice& executor) {
        cell.offload = offload;
        return train(ranks, {.executor = executor, .threads = 1}, cell, 5, 3);
      };
      const testing::Trained device = run(Offload::none, ExecutorKind::threaded);
      CHECK(testing::same_bits(device, run(Offload::cpu, ExecutorKind::threaded)));
      CHECK(testing::same_bits(device, run(Offload::cpu, testing::shuffled(fresh_seed()))));
    }
}

TEST_CASE("optimizers, norms and meshes of what lies on the host",
          "[threads][fsdp2-044][fsdp2-046]") {
  constexpr std::pair<DType, DType> kDtypes[] = {{f32, f32}, {bf16, f32}, {bf16, bf16}};
  constexpr std::pair<int, int> kMeshes[] = {{1, 1}, {2, 1}, {4, 1}, {4, 2}, {2, 2}};
  GridShare share;
  for (const bool is_adamw : {true, false})
    for (const auto& [param, reduce] : kDtypes)
      for (const auto& [ranks, replicas] : kMeshes)
        for (const optim::NormType type :
             {optim::NormType::l2, optim::NormType::l1, optim::NormType::inf})
          for (const int micro_batches : {1, 3})
            if ((ranks > 1 || micro_batches == 1) && share.takes())  // as above
              check_on_host(is_adamw, param, reduce, ranks, replicas, type, micro_batches);
}

TEST_CASE("one rank that adds micro-batches up on the host is within rounding of the device",
          "[threads]") {
  const auto run = [&](Offload offload) {
    return on_ranks(1, [&](World& world) {
      OffloadJob job(world, offload);
      for (int m = 0; m < 3; ++m) job.loss(m).backward();
      return shard_gradients(job.stack);
    })[0];
  };
  CHECK(distance(run(Offload::none), run(Offload::cpu)) < 1e-5);  // 24 terms of 2^-24, some cancel
}

TEST_CASE("at rest a device holds no shard, no gradient and no moment of what is offloaded",
          "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    struct Held {
      std::int64_t on_device = 0, staging = 0, weights = 0, moments = 0, gradients = 0, rows = 0;
      bool lies_on_host = true;
    };
    const auto held = on_ranks(ranks, [&](World& world) {
      OffloadJob job(world, Offload::cpu);
      optim::AdamW optimizer(job.stack.parameters());
      job.step(0, optimizer);
      job.loss(1).backward();
      const Memory& device = Memory::of(world.device());
      const Memory& host = Memory::of(world.device().host());
      Held out{.on_device =
                   live(device, "weights") + live(device, "moments") + live(device, "gradients"),
               .staging = live(device, "offload staging"),
               .weights = live(host, "weights"),
               .moments = live(host, "moments"),
               .gradients = live(host, "gradients")};
      for (const Parameter& p : job.stack.parameters()) {
        out.rows += (p.spec().chunk_numel() + 63) / 64 * 64;
        out.lies_on_host = out.lies_on_host && p.shard().device() == world.device().host() &&
                           p.grad().device() == p.shard().device() &&
                           optimizer.moments(p)[0].device() == p.shard().device() &&
                           p.shard().device().kind() == DeviceKind::cpu;
      }
      const ShardPlan plan = shard_plan(job.stack);
      out.lies_on_host = out.lies_on_host && plan.offload_device_bytes == out.staging;
      return out;
    });
    for (const Held& h : held) {
      CHECK(h.on_device == 0);
      CHECK(h.staging > 0);
      CHECK(h.weights == 4 * h.rows);
      CHECK(h.moments == 8 * h.rows);
      CHECK(h.gradients > 4 * h.rows);  // and arrival counts
      CHECK(h.lies_on_host);
    }
  }
}

TEST_CASE("what one rank offloads costs no collective", "[threads]") {
  const auto counters = on_ranks(1, [](World& world) {
    OffloadJob job(world, Offload::cpu);
    optim::AdamW optimizer(job.stack.parameters());
    job.step(0, optimizer);
    return shard_counters(job.stack);
  })[0];
  CHECK(counters.gathers == 0);
  CHECK(counters.reductions == 0);
  CHECK(counters.unplanned_slots == 0);
}

TEST_CASE("an inf on the host of one rank skips the step of all", "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    struct Seen {
      bool found = false, stayed = false, then_moved = false;
      double scale = 0;
    };
    const auto seen = on_ranks(ranks, [&](World& world) {
      OffloadJob job(world, Offload::cpu, f16);
      optim::AdamW optimizer(job.stack.parameters());
      optim::GradScaler scaler(world.device(), {.init_scale = 256});
      const auto step = [&](int k, bool is_poisoned) {
        scaler.scale(job.loss(k)).backward();
        if (is_poisoned && world.rank() == 0) spoil_gradient(job.stack, INFINITY);
        scaler.unscale(optimizer);
        optim::clip_grad_norm(job.stack.parameters(), 0.5);
        scaler.step(optimizer);
        const bool found = scaler.found_inf(optimizer).item() != 0;
        scaler.update();
        optimizer.zero_grad();
        return found;
      };
      step(0, false);
      const Values before = full_values(job.stack);
      Seen out;
      out.found = step(1, true);
      out.stayed = testing::same_bits(before, full_values(job.stack));
      out.scale = scaler.current_scale().item();
      step(2, false);
      out.then_moved =
          !testing::same_bits(before, full_values(job.stack)) && optimizer.steps() == 2;
      return out;
    });
    for (const Seen& s : seen) {
      CHECK(s.found);
      CHECK(s.stayed);
      CHECK(s.scale == 128);
      CHECK(s.then_moved);
    }
  }
}

TEST_CASE("parameters are frozen and thawed on the host as on the device", "[threads]") {
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto run = [&](Offload offload) {
      return on_ranks(ranks, [&](World& world) {
        OffloadJob job(world, offload);
        optim::AdamW optimizer(job.stack.parameters());
        job.step(0, optimizer);
        job.stack.layers[0].weight.freeze();
        job.stack.offset.freeze();
        job.step(1, optimizer);
        job.loss(2).backward();  // the gradients of what stays, laid out anew
        job.stack.layers[0].weight.set_trainable(true);
        if (ranks == 1) optimizer.zero_grad();  // one rank would add in its products
        return OffloadRun{
            {job.step(3, optimizer), job.step(4, optimizer)}, full_values(job.stack), {}};
      });
    };
    const auto device = run(Offload::none), host = run(Offload::cpu);
    for (std::size_t rank = 0; rank < host.size(); ++rank)
      CHECK(same_bits(device[rank], host[rank]));
  }
}

TEST_CASE("freed memory of the host is poisoned, and nobody reads it", "[threads]") {
  for (const Cell& cell : {Cell{.micro_batches = 3, .offload = Offload::cpu},
                           Cell{.param = bf16, .reduce = bf16, .offload = Offload::cpu}}) {
    const std::uint64_t seed = fresh_seed();
    INFO(cell << ", seed " << seed);
    const auto poisoned = on_ranks(2, [&](World& world) {
      Memory::of(world.device()).host().poison_freed();
      Memory::of(world.device()).poison_freed();
      return train(world, cell, seed, 2);
    });
    CHECK(testing::same_bits(poisoned[0], train(2, {.threads = 1}, cell, seed, 2)));
  }
}

TEST_CASE("all units of a root lie on the same side, on every rank") {
  const World world = World::single();
  Stack stack({4, 5, 3});
  const ShardOptions device{.mesh = DeviceMesh::flat(world)};
  ShardOptions host = device;
  host.offload = Offload::cpu;
  fully_shard(stack.layers[0], device);
  shard_each({&stack.layers[1], &stack}, host);
  stack.materialize(world.device());
  CHECK_THAT(thrown_by([&] { shard_plan(stack); }),
             Contains("unit 'layers.0' has its shards on the device, its root on the host") &&
                 Contains("one ShardOptions::offload"));
}

TEST_CASE("Muon refuses shards that lie on the host", "[threads]") {
  for (const int ranks : {1, 2})
    for (const std::string& error : on_ranks(ranks, [](World& world) {
           nn::Linear layer(4, 4);
           fully_shard(layer, {.mesh = DeviceMesh::flat(world), .offload = Offload::cpu});
           layer.materialize(world.device());
           optim::Muon optimizer({layer.weight}, {layer.bias});
           return thrown_by([&] { optimizer.prepare(); });
         }))
      CHECK_THAT(error, Contains("'weight' lie on the host"));
}

TEST_CASE("ranks that offload and ranks that do not are told of each other", "[threads]") {
  for (const std::string& error : on_ranks(2, [](World& world) {
         Stack stack({4, 5, 3});
         stack.shard({.mesh = DeviceMesh::flat(world),
                      .offload = world.rank() == 0 ? Offload::cpu : Offload::none});
         stack.materialize(world.device());
         return thrown_by([&] { shard_plan(stack); });
       }))
    CHECK_THAT(error, Contains("differs between ranks in offload; here: "));
}
