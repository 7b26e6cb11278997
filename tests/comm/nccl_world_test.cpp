// World::nccl over a double of NCCL and emulated GPUs, held against ranks as threads: the ranks are
// threads of this process or processes, each in a world of its own.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>

#include "runtime/comm/planned_nccl.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/comm/battery.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

std::string battery_of(const RankGroup& group, std::uint64_t seed) {
  const battery::Result result = battery::run(group, seed);
  return result.errors.empty() ? std::to_string(result.hash) : result.errors[0];
}

}  // namespace

// Two summands have one order: NCCL's sums of two ranks have the bits of threads, too.
TEST_CASE("nccl: every collective is right, on threads and on processes", "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(2, seed);
  const auto body = [&](World& world) { return battery_of(world, seed); };
  const std::vector<std::string> by_thread = nccl_threads(2, body);
  const std::vector<std::string> by_process = nccl_processes(2, body);
  for (std::size_t r = 0; r < 2; ++r) {
    CHECK(by_thread[r] == std::to_string(threads[r]));
    CHECK(by_process[r] == std::to_string(threads[r]));
  }
}

TEST_CASE("nccl: with ordered sums three ranks have the bits of threads, without them all is right",
          "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(3, seed);
  for (const bool ordered : {false, true}) {
    WorldOptions options;
    options.nccl.ordered_sums = ordered;
    const std::vector<std::string> said = nccl_threads(
        3,
        [&](World& world) {
          if (world.sums_are_ordered() != ordered) return std::string("sums_are_ordered is wrong");
          return battery_of(world, seed);
        },
        options);
    for (std::size_t r = 0; r < 3; ++r) {
      INFO("ordered " << ordered << ", rank " << r << ": " << said[r]);
      if (ordered)
        CHECK(said[r] == std::to_string(threads[r]));
      else
        CHECK(said[r].find_first_not_of("0123456789") == std::string::npos);
    }
  }
}

// Two blocks of the landing memory and more, of a count that no number of ranks divides. Each rank
// adds a part, so that it receives 2 (n - 1) / n times what it sends, but for a rest of less than
// 16 bytes a rank, of which it receives all.
TEST_CASE("nccl: a large ordered all_reduce moves its bytes twice, with the bits of threads",
          "[comm]") {
  constexpr std::int64_t kCount = (5 << 20) + 1021, kBytes = 2 * kCount;
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto sums_of = [&](World& world) {
    const auto memory = world.allocate_symmetric(2 * kBytes);
    auto* const send = reinterpret_cast<std::uint16_t*>(memory->data());
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(world.rank()));
    for (std::int64_t i = 0; i < kCount; ++i)
      send[i] = static_cast<std::uint16_t>(0x3f80 | (random() & 0x807f));  // of bf16, +-1 to 2
    LastUse use;
    const Access all[] = {{&use, memory->data(), memory->data() + 2 * kBytes, AccessMode::write}};
    world.reduce().submit({.send = send,
                           .recv = send + kCount,
                           .count = kCount,
                           .kind = CollectiveKind::all_reduce,
                           .dtype = DType::bf16},
                          "sum", all);
    world.device().synchronize();
    return std::vector<std::uint16_t>(send + kCount, send + 2 * kCount);
  };
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    std::vector<std::vector<std::uint16_t>> expected(static_cast<std::size_t>(ranks));
    run_local(ranks, {.threads = 1}, [&](World& world) {
      expected[static_cast<std::size_t>(world.rank())] = sums_of(world);
    });
    std::vector<std::vector<std::uint16_t>> found(expected.size());
    const long long before = double_count("moved");
    const std::vector<std::string> said = nccl_threads(ranks, [&](World& world) {
      found[static_cast<std::size_t>(world.rank())] = sums_of(world);
      return std::string();
    });
    for (const std::string& one : said) CHECK(one == "");
    CHECK(found == expected);
    const long long n = ranks, least = 2 * (n - 1) * kBytes, rest = n * n * n * 16;
    CHECK(double_count("moved") - before >= least - rest);
    CHECK(double_count("moved") - before <= least + rest);
  }
}

TEST_CASE("nccl: groups of any ranks, and of one, have the bits of threads", "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(2, seed);
  const std::vector<std::string> said = nccl_threads(4, [&](World& world) {
    const int other = (world.rank() + 2) % 4;
    const std::vector<int> pair{std::max(world.rank(), other), std::min(world.rank(), other)};
    const std::vector<int> alone{world.rank()};
    const RankGroup& single = *world.split("alone", alone);
    if (single.sum(2) != 2) return std::string("the sum of one rank is wrong");
    const std::string of_pair = battery_of(*world.split("pair", pair), seed);
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{.name = "dp_replicate", .size = 2}, {.name = "tp", .size = 2}});
    for (int i = 0; i < 8; ++i) world.allocate_symmetric((i + 1) * 4096);
    if (world.kind() != WorldKind::nccl || world.sum(1) != 4) return std::string("wrong");
    return of_pair;
  });
  for (std::size_t r = 0; r < 4; ++r) CHECK(said[r] == std::to_string(threads[r < 2 ? 1 : 0]));
}

TEST_CASE(
    "nccl: memory is a window of what gathers and reduces where it is asked for, with the same "
    "bits",
    "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(2, seed);
  const auto set = double_call<bool(const char*, long long)>("tessera_nccl_double_set");
  for (const bool windows : {true, false})
    for (const bool null : {false, true}) {
      INFO("windows " << windows << ", null " << null);
      REQUIRE(set("null_windows", null ? 1 : 0));
      WorldOptions options;
      if (windows) options.nccl.windows = true;  // they are off by default
      const std::vector<std::string> said = nccl_threads(
          2,
          [&](World& world) {
            const auto before = world.allocate_symmetric(10'000);
            const std::string hash = battery_of(world, seed);
            const auto behind = world.allocate_symmetric(10'000);
            world.barrier();
            // Two of each rank, of two communicators each.
            const long long expected = windows && !null ? 8 : 0;
            if (double_count("windows") != expected)
              return concat(double_count("windows"), " windows");
            if ((double_count("bytes") > 0) != windows)
              return concat(double_count("bytes"), " bytes");
            world.barrier();
            return hash;
          },
          options);
      for (std::size_t r = 0; r < 2; ++r) CHECK(said[r] == std::to_string(threads[r]));
      CHECK(double_count("windows") == 0);
      CHECK(double_count("bytes") == 0);
    }
  set("null_windows", 0);
}

// One communicator that is kept, `control` with one CTA, and `reduce` with the two that it may
// have.
TEST_CASE("nccl: what communicators take of a GPU is a line of the ledger, until they are gone",
          "[comm]") {
  constexpr std::int64_t kOfCta = 1 << 16, kKept = 8 * kOfCta, kAll = kKept + (1 + 2) * kOfCta;
  WorldOptions options;
  options.nccl.reduce_max_ctas = 2;
  const std::vector<std::string> said = nccl_threads(
      2,
      [](World& world) {
        const auto measured = [&] {
          return Memory::of(world.device()).ledger().outside_bytes(comm::kMeasuredNccl);
        };
        const std::int64_t kept = measured();
        if (Memory::of(world.device()).ledger().outside_bytes(comm::kNcclLanding) !=
            3 * comm::kNcclLandingBytes)
          return std::string("landing memory");
        LastUse use;
        const auto memory = world.allocate_symmetric(1 << 20);
        const Access all[] = {{&use, memory->data(), memory->data() + (1 << 20)}};
        for (int i = 0; i < 2; ++i)
          world.reduce().submit({.send = memory->data(),
                                 .recv = memory->data() + (1 << 19),
                                 .count = 1 << 16,
                                 .kind = CollectiveKind::all_reduce},
                                "sum", all);
        world.device().synchronize();
        world.barrier();
        const std::int64_t used = measured();
        if (kept != kKept || used != kAll || double_count("held") != 2 * kAll)
          return concat(kept, " and ", used, " bytes of ", double_count("held"));
        world.barrier();
        world.recover("a test");
        world.barrier();
        return measured() == kKept + kOfCta ? std::string() : concat(measured(), " bytes anew");
      },
      options);
  for (const std::string& one : said) CHECK(one == "");
  CHECK(double_count("held") == 0);
}

TEST_CASE("nccl: memory of NCCL's is whole granules, in a run and in its plan", "[comm]") {
  constexpr std::int64_t kGranule = 2 << 20;
  WorldOptions options;
  options.nccl.windows = true;
  const std::vector<std::string> said = nccl_threads(
      2,
      [](World& world) {
        const std::int64_t before = Memory::of(world.device()).reserved_bytes();
        const auto memory = world.allocate_symmetric(kGranule + 1);
        world.barrier();
        const long long taken = double_count("bytes");
        world.barrier();
        return concat(Memory::of(world.device()).reserved_bytes() - before, ' ', memory->bytes(),
                      ' ', taken);
      },
      options);
  for (const std::string& one : said)
    CHECK(one == concat(2 * kGranule, ' ', 2 * kGranule, ' ', 4 * kGranule));
  for (const bool windows : {false, true}) {
    options = over_the_double({}, 0);
    options.executor = ExecutorKind::virtual_;
    options.nccl.windows = windows;
    const World plan = World::emulated(0, 2, options);
    CHECK(plan.allocate_symmetric(kGranule + 1)->bytes() ==
          (windows ? 2 * kGranule : kGranule + 4096));
  }
}

TEST_CASE("nccl: a plan assumes what communicators take from their first call on", "[comm]") {
  WorldOptions options = over_the_double({}, 0);
  options.executor = ExecutorKind::virtual_;
  options.nccl.reduce_max_ctas = 2;
  const World plan = World::emulated(0, 2, options);
  const auto assumed = [&] {
    return Memory::of(plan.device()).ledger().outside_bytes(comm::kAssumedNccl);
  };
  CHECK(assumed() == 0);
  CHECK(Memory::of(plan.device()).ledger().outside_bytes(comm::kNcclLanding) ==
        3 * comm::kNcclLandingBytes);
  plan.barrier();
  plan.barrier();
  CHECK(assumed() == comm::assumed_nccl_bytes(1));
  plan.reduce().submit({.kind = CollectiveKind::barrier}, "barrier", {});
  CHECK(assumed() == 3 * comm::assumed_nccl_bytes(1));
  plan.gather().submit({.kind = CollectiveKind::barrier}, "barrier", {});
  CHECK(assumed() == 35 * comm::assumed_nccl_bytes(1));
  options.executor = {};
  options.device = {};
  const World cpu = World::emulated(0, 2, options);
  cpu.barrier();
  CHECK(Memory::of(cpu.device()).ledger().outside_bytes(comm::kAssumedNccl) == 0);
}

TEST_CASE("nccl: gathers alone have the policy of no CTAs, which needs windows", "[comm]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(2, seed);
  WorldOptions options;
  options.nccl.gather_policy = GatherPolicy::zero;
  const auto body = [&](World& world) { return battery_of(world, seed); };
  for (const std::string& one : nccl_threads(2, body, options))
    CHECK_THAT(one, Contains("set windows"));
  options.nccl.windows = true;
  const long long before = double_count("zero_ctas");
  const std::vector<std::string> said = nccl_threads(2, body, options);
  for (std::size_t r = 0; r < 2; ++r) CHECK(said[r] == std::to_string(threads[r]));
  CHECK(double_count("zero_ctas") == before + 2);
}

// Or NCCL would map the next window at another place on each rank, which the double names.
TEST_CASE("nccl: memory that ranks drop at different times is freed on all at once", "[comm]") {
  WorldOptions options;
  options.nccl.windows = true;
  const std::vector<std::string> all = nccl_threads(
      2,
      [&](World& world) {
        auto first = world.allocate_symmetric(4096);
        const auto second = world.allocate_symmetric(1 << 20);
        const Collective gather{.send = second->data() + world.rank() * (1 << 19),
                                .recv = second->data(),
                                .count = (1 << 19) / 4,
                                .kind = CollectiveKind::all_gather};
        world.gather().submit(gather, "gather", {});
        if (world.rank() == 0) first.reset();
        const auto third = world.allocate_symmetric(4096);
        world.gather().submit(gather, "gather", {});
        if (world.rank() == 1) first.reset();
        world.barrier();
        const long long before = double_count("windows");
        world.barrier();
        const auto fourth = world.allocate_symmetric(4096);
        const auto fifth = world.allocate_symmetric(4096);
        world.gather().submit(gather, "gather", {});
        world.barrier();
        std::string found = concat(before, " windows, then ", double_count("windows"));
        world.barrier();
        return found;
      },
      options);
  for (const std::string& said : all) CHECK(said == "6 windows, then 8");
  CHECK(double_count("windows") == 0);
  CHECK(double_count("bytes") == 0);
}
