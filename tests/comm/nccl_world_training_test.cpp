// The engine over World::nccl: with ordered sums its losses, norms, gradients and parameters have
// the bits of ranks as threads.
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "tessera/memory/memory.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/promises/support.hpp"
#include "tests/shard/modules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("nccl: training has the bits of threads where sums are ordered") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  WorldOptions options;
  options.nccl.ordered_sums = options.nccl.windows = true;
  for (const Cell& cell : all_cells()) {
    if (!share.takes()) continue;
    const int ranks = worlds_of(cell).back();
    INFO(cell << ", " << ranks << " ranks, seed " << seed);
    const Trained threads = train(ranks, {.threads = 1}, cell, seed, 3);
    std::vector<Trained> all(static_cast<std::size_t>(ranks));
    const std::vector<std::string> said = nccl_threads(
        ranks,
        [&](World& world) {
          all[static_cast<std::size_t>(world.rank())] = train(world, cell, seed, 3);
          return std::string("trained");
        },
        options);
    for (std::size_t r = 0; r < all.size(); ++r) {
      CHECK(said[r] == "trained");
      CHECK(same_bits(threads, all[r]));
    }
  }
}

// NCCL adds f32 gradients in an order of its own, but two summands have one.
TEST_CASE("nccl: two ranks train with the bits of threads, also where NCCL adds") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const Cell& cell : all_cells()) {
    if (!share.takes() || cell.replicas > 1 || cell.reshard.is_partial()) continue;
    INFO(cell << ", seed " << seed);
    const Trained threads = train(2, {.threads = 1}, cell, seed, 3);
    std::vector<Trained> all(2);
    const std::vector<std::string> said = nccl_threads(2, [&](World& world) {
      all[static_cast<std::size_t>(world.rank())] = train(world, cell, seed, 3);
      return std::string("trained");
    });
    for (std::size_t r = 0; r < all.size(); ++r) {
      CHECK(said[r] == "trained");
      CHECK(same_bits(threads, all[r]));
    }
  }
}

namespace {

// Two steps of one cell on two ranks, in which NCCL adds.
struct Sums {
  Trained trained;
  long long all = 0, windowed = 0;  // of both ranks
  std::int64_t symmetric_bytes = 0;
};
Sums sums_of(const Cell& cell, bool windows, std::uint64_t seed) {
  WorldOptions options;
  options.nccl.windows = windows;
  Sums sums;
  const long long all = double_count("sums"), windowed = double_count("windowed_sums");
  for (const std::string& said : nccl_threads(
           2,
           [&](World& world) {
             Trainee trainee(world, cell, seed);
             const Trained trained = train(world, trainee, 2);
             const ShardPlan plan = shard_plan(trainee.model());
             if (world.rank() == 0) sums.trained = trained;
             if (world.rank() == 0) sums.symmetric_bytes = plan.symmetric_gradient_bytes;
             return std::string("trained");
           },
           options))
    CHECK(said == "trained");
  sums.all = double_count("sums") - all;
  sums.windowed = double_count("windowed_sums") - windowed;
  return sums;
}

}  // namespace

TEST_CASE("nccl: with windows sums go from window to window where shards are even", "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Sums plain = sums_of({}, false, seed), even = sums_of({}, true, seed);
  CHECK(plain.windowed == 0);
  CHECK(plain.symmetric_bytes == 0);
  CHECK(even.all == plain.all);
  CHECK(even.windowed == even.all);
  CHECK(even.symmetric_bytes == 2 << 20);
  CHECK(same_bits(even.trained, plain.trained));
  // The blocks' are ragged, the tables' are not.
  const Sums ragged = sums_of({.ragged = true}, true, seed);
  CHECK(ragged.windowed > 0);
  CHECK(ragged.windowed < ragged.all);
  CHECK(same_bits(ragged.trained, sums_of({.ragged = true}, false, seed).trained));
  // What is added to a gradient that is there is staged. Sums of 16 bits are no sums of NCCL's.
  const Cell added{.micro_batches = 2};
  const Sums twice = sums_of(added, true, seed);
  CHECK(twice.windowed > 0);
  CHECK(twice.windowed < twice.all);
  CHECK(same_bits(twice.trained, sums_of(added, false, seed).trained));
  for (const Cell& cell : {Cell{.param = bf16, .reduce = bf16}, Cell{.offload = Offload::cpu}}) {
    const Sums other = sums_of(cell, true, seed);
    CHECK(other.windowed == 0);
    CHECK(other.symmetric_bytes == 0);
  }
}

// Their sums are NCCL's from 64 KiB on; smaller ones are folded.
TEST_CASE("nccl: with windows the sums over replicas go from window to window", "[comm]") {
  const auto gradients_of = [](bool windows) {
    WorldOptions options;
    options.nccl.windows = windows;
    return nccl_threads(
        4,
        [](World& world) {
          Mlp model({256, 512, 4});
          model.shard({.mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2})});
          nn::init(model, {7}, world.device());
          std::vector<float> rows(3 * 256);
          for (std::size_t i = 0; i < rows.size(); ++i)
            rows[i] = std::sin(static_cast<float>(i) + 1000.0F * static_cast<float>(world.rank()));
          const Tensor x = Tensor::from(rows, {3, 256}, world.device());
          std::string sums;
          for (int step = 0; step < 2; ++step) {
            sum(model(x)).backward();
            for (const Parameter& p : model.parameters()) {
              const std::vector<float> values = p.grad().to_vector<float>();
              sums.append(reinterpret_cast<const char*>(values.data()), 4 * values.size());
            }
            model.zero_grad();
          }
          return sums;
        },
        options);
  };
  const long long none = double_count("windowed_sums");
  const std::vector<std::string> plain = gradients_of(false);
  const long long before = double_count("windowed_sums");
  CHECK(before == none);
  CHECK(gradients_of(true) == plain);
  CHECK(double_count("windowed_sums") - before == 2 * 4);  // of a step and rank one is so large
}

TEST_CASE("nccl: a plan reserves what a run with windows does", "[comm]") {
  const auto reserved = [](World& world) {
    Job job(world, {.ranks = 2}, 1);
    const ShardPlan plan = shard_plan(job.model);
    const std::int64_t before = Memory::of(world.device()).reserved_bytes();
    job.step(job.batch(0));
    job.step(job.batch(1));
    world.device().synchronize();
    return concat(plan.symmetric_gradient_bytes, ' ', plan.arena_bytes, ' ', before, ' ',
                  Memory::of(world.device()).reserved_bytes());
  };
  WorldOptions options;
  options.nccl.windows = true;
  const auto as_planned = [&] {
    WorldOptions all = over_the_double(options, 0);
    all.executor = ExecutorKind::virtual_;
    World plan = World::emulated(0, 2, all);
    return reserved(plan);
  };
  const std::string planned = as_planned();
  CHECK(planned.substr(0, 8) == concat(2 << 20, ' '));
  for (const std::string& said : nccl_threads(2, reserved, options)) CHECK(said == planned);
}

TEST_CASE("nccl: who holds a gradient over the next backward hears of windows", "[comm]") {
  WorldOptions options;
  options.nccl.windows = true;
  const std::vector<std::string> all = nccl_threads(
      2,
      [](World& world) {
        Job job(world, {.ranks = 2}, 1);
        Tensor held;
        const auto step = [&](std::uint64_t i) {
          job.model.loss(job.batch(i)[0], job.batch(i)[1]).backward();
          if (i == 0) held = job.model.parameters()[0].grad();
          job.optimizer->zero_grad();
        };
        step(0);
        std::string heard;
        try {
          step(1);
        } catch (const ContractError& error) {
          heard = error.what();
        }
        held = {};
        reset(job.model);
        step(1);
        return heard;
      },
      options);
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("of an earlier step is still held, and with NcclOptions::windows"));
}

// What the host had not seen the end of has perhaps run.
TEST_CASE("nccl: a failure that finds an update in flight leaves parameters to be loaded",
          "[comm]") {
  for (const bool sees_its_end : {true, false}) {
    const std::vector<std::string> all = nccl_threads(2, [&](World& world) {
      Job job(world, {.ranks = 2}, 1);
      for (std::uint64_t i = 0; i < 2; ++i) job.step(job.batch(i));
      if (sees_its_end) world.device().synchronize();
      try {
        if (world.rank() == 1) throw std::runtime_error("no luck");
        for (;;) world.sum(1);
      } catch (const std::exception&) {
        return concat(reset(job.model).parameters_are_consistent, ' ', job.optimizer->steps());
      }
    });
    for (const std::string& said : all)
      CHECK(said.substr(0, sees_its_end ? 3 : 1) == (sees_its_end ? "1 2" : "0"));
  }
}

// The reduce-scatter is refused where its sums have their place already.
TEST_CASE("nccl: a hybrid mesh goes on after a failure that backward meets", "[comm]") {
  const auto last_gradients = [](bool fails) {
    return nccl_threads(4, [&](World& world) {
      Mlp model({6, 8, 4});
      model.shard({.mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2})});
      nn::init(model, {7}, world.device());
      const Tensor x = Tensor::full({3, 6}, 0.1 * (1 + world.rank()), f32, world.device());
      if (fails) try {
          const Tensor y = on_gradient(model(x), [&](const Tensor& gradient) {
            if (world.rank() == 0) throw std::runtime_error("no luck");
            std::this_thread::sleep_for(std::chrono::seconds(1));  // until it has been heard of
            return gradient;
          });
          sum(y).backward();
          world.device().synchronize();
          return std::string("nothing failed");
        } catch (const std::exception&) {
          reset(model);
        }
      sum(model(x)).backward();
      std::string all;
      for (const Parameter& p : model.parameters())
        for (const float value : p.grad().to_vector<float>()) all += concat(value, ' ');
      return all;
    });
  };
  CHECK(last_gradients(true) == last_gradients(false));
}
