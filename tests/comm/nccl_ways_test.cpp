// How NCCL gathers and reduces where options leave it open: what is measured, that all ranks follow
// rank 0, and what the line says. Time passes as nccl_mistaken_module.cpp has it, not as the
// machine does.
#include <array>
#include <cstdlib>
#include <functional>
#include <mutex>

#include "tessera/base/log.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

constexpr RankGroup::Sizes kSizes{.gathered_bytes = 1 << 20, .reduced_bytes = 1 << 20};

WorldOptions measured() {
  WorldOptions options;
  options.nccl.windows = true;
  options.nccl.gather_policy = GatherPolicy::measured;
  options.nccl.reduce_max_ctas = NcclOptions::kMeasuredCtas;
  return options;
}

// On two ranks that are processes. `slow`: what each finds slow. What `body` says stands behind
// what the rank has logged.
std::vector<std::string> with(const std::array<const char*, 2>& slow, const NcclBody& body,
                              const WorldOptions& options = measured(), const Adapt& adapt = {}) {
  const int port = free_port();
  std::vector<std::string> said;
  for (const Ended& ended : run_forked(2, [&](int rank) {
         static std::mutex mutex;
         static std::string lines;
         set_log_sink([](LogLevel, const std::string& line) {
           const std::lock_guard lock(mutex);
           lines += line + "\n";
         });
         setenv("TESSERA_NCCL_SLOW", slow[static_cast<std::size_t>(rank)], 1);
         const Gpus gpus(2);
         const std::string own = say({.rank = rank, .size = 2, .port = port}, options, body,
                                     [&](int, WorldOptions& all) {
                                       all.nccl.module = TESSERA_MISTAKEN_MODULE;
                                       all.device.module = TESSERA_MISTAKEN_MODULE;
                                       if (adapt) adapt(rank, all);
                                     });
         const std::lock_guard lock(mutex);
         return lines + own;
       }))
    said.push_back(ended.said);
  return said;
}

// How many communicators of gathers without CTAs the next gather makes.
std::string gathers_anew(World& world) {
  const auto memory = world.allocate_symmetric(1 << 20);
  const long long before = double_count("zero_ctas");
  world.gather().submit({.send = memory->data() + world.rank() * (1 << 19),
                         .recv = memory->data(),
                         .count = 1 << 19,
                         .kind = CollectiveKind::all_gather,
                         .dtype = DType::u8},
                        "gather", {});
  world.device().synchronize();
  return concat(double_count("zero_ctas") - before, " without CTAs");
}

std::string measures(World& world) {
  world.expect_sizes(kSizes);
  return gathers_anew(world);
}

}  // namespace

TEST_CASE("nccl: what is faster beside compute on rank 0 is taken on all ranks", "[comm]") {
  struct Case {
    std::array<const char*, 2> slow;
    const char *gathers, *reduces, *then;
  };
  for (const Case& c :
       {Case{{"zero few", "zero few"}, ": as NCCL wants;", ": as NCCL wants\n", "0 without CTAs"},
        Case{{"standard most", "standard most"},
             ": by copy engines;",
             ": with 8\n",
             "1 without CTAs"},
        Case{{"standard few", "zero most"},
             ": by copy engines;",
             ": as NCCL wants\n",
             "1 without CTAs"},
        Case{{"none", "standard most"},
             ": as NCCL wants;",
             ": as NCCL wants\n",
             "0 without CTAs"}}) {
    const std::vector<std::string> said = with(c.slow, measures);
    INFO(said[0] << "\n" << said[1]);
    CHECK_THAT(said[0],
               Contains("NCCL, medians of 7 on rank 0: gathers of 1048576 bytes beside ") &&
                   Contains(c.gathers) && Contains("reductions of 1048576 bytes beside ") &&
                   Contains("with at most 8 CTAs ") && Contains(c.reduces) && Contains(c.then));
    CHECK_THAT(said[1], !Contains("medians") && Contains(c.then));
  }
}

TEST_CASE("nccl: a way that is not there is not measured, and the line says why", "[comm]") {
  struct Case {
    const char* why;
    std::function<void(WorldOptions&)> misses;
  };
  for (const Case& c :
       {Case{"as there are no windows", [](WorldOptions& o) { o.nccl.windows = false; }},
        Case{"as a driver is older than that of CUDA 12.5",
             [](WorldOptions&) { setenv("TESSERA_NCCL_DRIVER", "12040", 1); }},
        Case{"as NCCL 2.27.5 is older than 2.28",
             [](WorldOptions&) { setenv("TESSERA_NCCL_VERSION", "22705", 1); }}}) {
    WorldOptions options = measured();
    options.nccl.reduce_max_ctas = 0;
    const std::vector<std::string> said = with({"standard", "standard"}, measures, options,
                                               [&](int, WorldOptions& own) { c.misses(own); });
    CHECK_THAT(said[0], Contains(concat("by copy engines not measured, ", c.why)) &&
                            Contains(": as NCCL wants\n") && !Contains("reductions") &&
                            Contains("0 without CTAs"));
    CHECK_THAT(said[1], Contains("0 without CTAs"));
  }
}

TEST_CASE("nccl: a failure while ways are measured has them measured anew, and no later one does",
          "[comm]") {
  const auto break_rank = double_call<void(int, long long, int)>("tessera_nccl_double_break");
  WorldOptions options = measured();
  options.timeout_seconds = 3;
  const std::vector<std::string> said = with(
      {"standard", "standard"},
      [&](World& world) {
        const auto fails = [&](const std::function<void()>& call) {
          try {
            call();
          } catch (const CommError&) {
            break_rank(1, -1, 0);
            world.recover();
            return std::string("failed; ");
          }
          return std::string("went on; ");
        };
        world.sum(1);
        if (world.rank() == 1) break_rank(1, 5, 0);
        std::string told = fails([&] { world.expect_sizes(kSizes); });
        told += measures(world) + "; ";
        if (world.rank() == 1) break_rank(1, 0, 0);
        told += fails([&] { world.barrier(); });
        told += measures(world);
        return told;
      },
      options);
  for (const std::string& one : said)
    CHECK_THAT(one, Contains("failed; 1 without CTAs; failed; 1 without CTAs"));
  CHECK_THAT(said[0], Contains("medians"));
  CHECK(said[0].find("medians") == said[0].rfind("medians"));
}

TEST_CASE("nccl: the engine tells its sizes, so a job measures before its first step", "[comm]") {
  const auto trains = [](World& world) {
    Job job(world, {.ranks = 2}, 1);
    std::string losses;
    for (std::uint64_t i = 0; i < 3; ++i)
      losses += concat(job.step(job.batch(i))[0].to_vector<float>()[0], ' ');
    return concat("losses ", losses);
  };
  const std::vector<std::string> plain = with({"", ""}, trains, {}),
                                 said = with({"standard most", ""}, trains);
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE_THAT(plain[r], Contains("losses "));
    CHECK_THAT(said[r], Contains(plain[r].substr(plain[r].find("losses "))));
  }
  CHECK_THAT(said[0], Contains(": by copy engines;") && Contains(": with 8\n"));
}

TEST_CASE("nccl: memory that ways are measured with is given back", "[comm]") {
  const std::vector<std::string> said = with({"", ""}, [](World& world) {
    const std::int64_t own = Memory::of(world.device()).reserved_bytes();
    world.expect_sizes(kSizes);
    return concat(Memory::of(world.device()).reserved_bytes() - own, " bytes more");
  });
  for (const std::string& one : said) CHECK_THAT(one, Contains("0 bytes more"));
}
