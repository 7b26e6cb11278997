// Mistakes in how NCCL is called, made on purpose: the double of NCCL names each, or holds what
// waits for ever, and then the process ends with the reason.
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <stdexcept>

#include "tessera/base/log.hpp"
#include "tests/comm/battery.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// What ranks that are processes say and log, one text for each; nccl_mistaken_module.cpp makes the
// mistake.
std::vector<std::string> with(const char* mistake, const NcclBody& body,
                              const WorldOptions& options = {}, int ranks = 2) {
  const int port = free_port();
  std::vector<std::array<int, 2>> logs(static_cast<std::size_t>(ranks));
  for (auto& ends : logs) REQUIRE(pipe(ends.data()) == 0);
  const std::vector<Ended> all = run_forked(ranks, [&](int rank) {
    set_log_sink([&, rank](LogLevel, const std::string& line) {
      static_cast<void>(!write(logs[static_cast<std::size_t>(rank)][1], line.data(), line.size()));
    });
    setenv("TESSERA_NCCL_MISTAKE", mistake, 1);
    const Gpus gpus(ranks);
    return say({.rank = rank, .size = ranks, .port = port}, options, body,
               [](int, WorldOptions& own) {
                 own.init_timeout_seconds = 3;
                 own.nccl.module = own.device.module = TESSERA_MISTAKEN_MODULE;
               });
  });
  std::vector<std::string> said;
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::array<char, 4096> log{};
    close(logs[r][1]);
    static_cast<void>(!read(logs[r][0], log.data(), log.size() - 1));
    close(logs[r][0]);
    said.push_back(concat(all[r].said, " log: ", log.data()));
  }
  return said;
}

std::string recovers(World& world) {
  try {
    world.sum(1);
    if (world.rank() == 0) throw std::runtime_error("no luck");
    for (;;) world.sum(1);
  } catch (const std::exception&) {
    world.recover();
  }
  return world.sum(1) == 2 ? "went on" : "the sum is wrong";
}

std::string captures(World& world) {
  Job job(world, {.ranks = 2}, 1);
  CapturedStep step(job.device, [&](const std::vector<Tensor>& batch) { return job.step(batch); });
  for (std::uint64_t i = 0; i < 6; ++i) step(job.batch(i))[0].to_vector<float>();
  if (step.replays() == 0) return "no replay";
  world.end();
  return "ended";
}

// In place, of half a MiB of each of two ranks.
Collective gather_into(const World& world, const SymmetricMemory& memory) {
  return {.send = memory.data() + world.rank() * (1 << 19),
          .recv = memory.data(),
          .count = (1 << 19) / 4,
          .kind = CollectiveKind::all_gather};
}

// A gather and a sum are under way on rank 0, on two streams, when rank 1 fails.
std::string hangs_on_two_streams(World& world) {
  world.sum(1);
  const auto memory = world.allocate_symmetric(1 << 20);
  const Collective gather = gather_into(world, *memory);
  world.gather().submit(gather, "warm", {});
  world.device().synchronize();
  if (world.rank() == 1) throw std::runtime_error("no luck");
  world.gather().submit(gather, "hangs", {});
  for (;;) world.sum(1);
}

std::string calls_on_two_roles(World& world) {
  const auto memory = world.allocate_symmetric(1 << 20), other = world.allocate_symmetric(3 << 20);
  const Collective gather = gather_into(world, *memory);
  const Collective sum{.send = other->data(),
                       .recv = other->data() + (1 << 20),
                       .count = 1 << 17,
                       .kind = CollectiveKind::all_reduce};
  world.gather().submit(gather, "gather", {});
  world.reduce().submit(sum, "sum", {});
  world.sum(1);
  world.device().synchronize();
  return "came through";
}

}  // namespace

TEST_CASE("nccl: bodies that mistakes break run without them", "[comm]") {
  WorldOptions windows;
  windows.nccl.windows = true;
  for (const std::string& said : with("none", recovers)) CHECK_THAT(said, Contains("went on"));
  for (const std::string& said : with("none", captures)) CHECK_THAT(said, Contains("ended"));
  for (const std::string& said : with("none", calls_on_two_roles, windows))
    CHECK_THAT(said, Contains("came through"));
  for (const std::string& said : with("none", hangs_on_two_streams))
    CHECK_THAT(said, Contains("no luck") && !Contains("has not come back"));
}

TEST_CASE("nccl: a mistake in how NCCL is called is found", "[comm]") {
  const auto found = [](const char* mistake, const NcclBody& body, const char* line,
                        const WorldOptions& options = {}) {
    const std::vector<std::string> all = with(mistake, body, options);
    INFO(mistake << ": " << all[0] << "\n" << all[1]);
    CHECK((all[0] + all[1]).find(line) != std::string::npos);
  };
  WorldOptions windows;
  windows.nccl.windows = true;
  found("keeps_graphs", captures, "NCCL's abort has not come back");
  found("aborts_one_by_one", hangs_on_two_streams, "NCCL's abort has not come back");
  found("uses_an_old_id", recovers, "every attempt has its own id");
  found("makes_in_other_order", calls_on_two_roles, " order");
  found("registers_in_other_order", calls_on_two_roles, "in one order", windows);
  found("asks_captured_events", captures, "recorded in a capture");
}

// Two summands are rounded once in any case.
TEST_CASE("nccl: three ranks that add 16-bit values as ncclSum does have other bits than threads",
          "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(3, seed);
  WorldOptions options;
  options.nccl.ordered_sums = true;
  const auto body = [&](World& world) {
    return concat(battery::run(world, seed).hash == threads[static_cast<std::size_t>(world.rank())]
                      ? "the bits"
                      : "other bits",
                  " of threads");
  };
  for (const std::string& said : with("none", body, options, 3))
    CHECK_THAT(said, Contains("the bits of threads"));
  for (const std::string& said : with("rounds_at_each_hop", body, options, 3))
    CHECK_THAT(said, Contains("other bits of threads"));
}
