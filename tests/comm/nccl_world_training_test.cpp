// The engine over World::nccl: with ordered sums its losses, norms, gradients and parameters have
// the bits of ranks as threads.
#include <stdexcept>

#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

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
