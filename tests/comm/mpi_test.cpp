// Ranks as processes, held against ranks as threads. Run under mpirun; see mpi_keeper.hpp.
#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <optional>
#include <random>
#include <stdexcept>

#include "tessera/comm/lost_rank.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/comm/battery.hpp"
#include "tests/comm/mismatch.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::RaceCheck;
using tessera::testing::run_checked;
using K = CollectiveKind;

namespace {

int mappings() {
  std::ifstream maps("/proc/self/maps");
  int lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

}  // namespace

TEST_CASE("mpi: every collective is right, with the bits of threads", "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  const int size = keeper().size();
  REQUIRE(size >= 2);  // run it under mpirun
  const auto rank = static_cast<std::size_t>(keeper().rank());
  std::vector<battery::Result> threads(static_cast<std::size_t>(size));
  run_checked(size, {}, [&](World& world) {
    threads[static_cast<std::size_t>(world.rank())] = battery::run(world, seed);
  });
  for (const auto executor : {ExecutorKind::threaded, ExecutorKind::inlined})
    for (const auto transport : {Transport::automatic, Transport::messages}) {
      INFO(name(executor) << (transport == Transport::messages ? ", messages" : ", shared memory"));
      const RaceCheck check;
      World world = World::mpi(check({.executor = executor, .transport = transport}));
      const battery::Result result = battery::run(world, seed);
      for (const std::string& error : result.errors) FAIL_CHECK(error);
      CHECK(result.hash == threads[rank].hash);
    }
}

TEST_CASE("mpi: a world knows itself, sums and finds maxima", "[comm][mpi]") {
  const int size = keeper().size();
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 2, .transport = transport}));
    CHECK(world.kind() == WorldKind::mpi);
    CHECK(world.rank() == keeper().rank());
    CHECK(world.threads() == 2);
    double expected = 0;
    for (int r = 0; r < size; ++r) expected += 0.1 * r;
    CHECK(world.sum(0.1 * world.rank()) == expected);
    CHECK(world.max(-1.0 - world.rank()) == -1.0);
    world.barrier();
    CHECK(world.control().submitted() == 3);
  }
  CHECK(World::mpi().threads() >= 1);
}

TEST_CASE("mpi: every rank hears which two ranks disagree", "[comm][mpi]") {
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    const std::string message = thrown(
        [](World& world) {
          const auto arena = world.allocate_symmetric(4096);
          const bool odd = world.rank() == 1;
          world.gather().submit({.send = arena->data(),
                                 .recv = arena->data() + 1024,
                                 .count = odd ? 3 : 4,
                                 .kind = odd ? K::all_gather : K::reduce_scatter},
                                odd ? "unit b" : "unit a", {});
          world.device().synchronize();
        },
        {.transport = transport});
    // Found where the calls meet, or before by who looks at what ranks wait for.
    CHECK_THAT(message, Contains("rank 0 submitted 'unit a'") && Contains("reduce_scatter of 4"));
    CHECK_THAT(message, Contains("rank 1 submitted 'unit b'") && Contains("all_gather of 3"));
    CHECK_THAT(message, Contains("CommError: ") && Contains("'gather'") && Contains("call 1"));
  }
}

TEST_CASE("mpi: a rank that goes astray is named on every rank, before a byte moves",
          "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  for (const auto transport : {Transport::automatic, Transport::messages})
    for (const mismatch::Kind& kind : mismatch::kinds()) {
      const int odd = static_cast<int>(draw() % static_cast<unsigned>(keeper().size()));
      INFO((transport == Transport::messages ? "messages" : "shared memory"));
      mismatch::Heard heard;
      thrown(
          [&](World& world) {
            heard = mismatch::provoke(world, kind, odd);
            throw std::runtime_error(heard.message);
          },
          {.transport = transport, .timeout_seconds = 10});
      CHECK(mismatch::verdict(heard, kind, keeper().rank(), odd) == "");
    }
}

TEST_CASE("mpi: sends from different offsets are refused on every rank", "[comm][mpi]") {
  const std::string message = thrown([](World& world) {
    const auto arena = world.allocate_symmetric(8192);
    world.reduce().submit({.send = arena->data() + 64 * world.rank(),
                           .recv = arena->data() + 4096,
                           .count = 2,
                           .kind = K::reduce_scatter},
                          "unit", {});
    world.device().synchronize();
  });
  CHECK_THAT(message, Contains("CommError") && Contains("different offsets"));
}

TEST_CASE("mpi: a send that other processes cannot read is refused before it is submitted",
          "[comm][mpi]") {
  const RaceCheck check;
  World world = World::mpi(check({}));
  const auto arena = world.allocate_symmetric(4 * kStagedBytes);
  std::vector<float> mine(kStagedBytes / 4 + 1, 1.f);
  const auto count = static_cast<std::int64_t>(mine.size());
  auto* const recv = reinterpret_cast<float*>(arena->data());
  for (const K kind : {K::all_gather, K::reduce_scatter})
    CHECK_THROWS_WITH(world.gather().submit(
                          {.send = mine.data(), .recv = recv, .count = 4, .kind = kind}, "u", {}),
                      Contains("allocate_symmetric"));
  for (const K kind : {K::all_reduce, K::broadcast})
    CHECK_THROWS_WITH(
        world.gather().submit({.send = mine.data(), .recv = recv, .count = count, .kind = kind},
                              "u", {}),
        Contains("allocate_symmetric"));
  CHECK(world.gather().submitted() == 0);
  world.gather().submit(
      {.send = mine.data(), .recv = mine.data(), .count = count - 1, .kind = K::all_reduce}, "u",
      {});
  world.device().synchronize();
  CHECK(mine.front() == static_cast<float>(world.size()));
  CHECK(mine.back() == 1.f);
}

TEST_CASE("mpi: a send is read where its root has it, and its target gives none", "[comm][mpi]") {
  constexpr std::int64_t kCount = kStagedBytes / 4 + 1;  // not staged
  const int last = keeper().size() - 1;
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    const RaceCheck check;
    World world = World::mpi(check({.transport = transport}));
    const auto first = world.allocate_symmetric(4096);
    const auto arena = world.allocate_symmetric(4 * kStagedBytes);
    // Each rank's send lies elsewhere: the next one gets it.
    auto* const mine = reinterpret_cast<float*>(arena->data()) + 64 * world.rank();
    std::fill_n(mine, kCount, static_cast<float>(world.rank()));
    std::vector<float> got(kCount, -1.f);
    CollectiveGroup shift("shift");
    for (int r = 0; r < last; ++r)
      shift.edit().push_back({.send = r == world.rank() ? mine : nullptr,
                              .recv = r + 1 == world.rank() ? got.data() : nullptr,
                              .count = kCount,
                              .kind = K::send_recv,
                              .root = r,
                              .target = r + 1});
    world.control().submit(shift, {});
    world.device().synchronize();
    CHECK(std::ranges::all_of(got,
                              [&](float x) { return x == static_cast<float>(world.rank() - 1); }));
    std::vector<float> outside(kCount);
    Collective item{.send = outside.data(), .count = kCount, .kind = K::send_recv, .target = last};
    item.recv = got.data();
    if (transport == Transport::automatic && world.rank() == 0)
      CHECK_THROWS_WITH(world.control().submit(item, "u", {}), Contains("allocate_symmetric"));
  }
}

TEST_CASE("mpi: a rank that throws is named to its peers", "[comm][mpi]") {
  for (int thrower = 0; thrower < keeper().size(); ++thrower) {
    const std::string message = thrown([&](World& world) {
      world.sum(1.0);
      if (world.rank() == thrower) throw std::runtime_error("the disk is full");
      world.sum(2.0);
    });
    if (keeper().rank() == thrower)
      CHECK(message == "the disk is full");
    else
      CHECK_THAT(message, Contains("CommError") && Contains(concat("rank ", thrower, " failed")));
  }
}

TEST_CASE("mpi: a rank that ends early is named to its peers", "[comm][mpi]") {
  for (const bool allocates : {false, true}) {
    const std::string message = thrown([&](World& world) {
      world.barrier();
      if (world.rank() == 1) return;
      if (allocates)
        world.allocate_symmetric(4096);
      else
        world.sum(2.0);
    });
    if (keeper().rank() == 1)
      CHECK(message.empty());
    else  // from the first to notice, or from another rank that failed for the same reason
      CHECK_THAT(message,
                 Contains("CommError") && (Contains("rank 1 has ended") || Contains("failed")));
  }
}

TEST_CASE("mpi: a collective that waits too long names who is missing and where everyone is",
          "[comm][mpi]") {
  const int late = keeper().size() - 1;
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    keeper().barrier();  // all begin together
    std::chrono::duration<double> waited{};
    bool speaks = false;
    const std::string message = thrown(
        [&](World& world) {
          world.sum(1.0);
          if (world.rank() == late) keeper().barrier();  // when all others have given up
          std::exception_ptr lost;
          const auto start = std::chrono::steady_clock::now();
          try {
            world.barrier();
          } catch (const LostRank&) {
            waited = std::chrono::steady_clock::now() - start;
            lost = std::current_exception();
          }
          if (world.rank() != late) keeper().barrier();
          speaks = lost != nullptr;
          if (lost) std::rethrow_exception(lost);
        },
        {.transport = transport, .timeout_seconds = 1});
    INFO((transport == Transport::messages ? "messages" : "shared memory"));
    CHECK(speaks);
    CHECK_THAT(message, Contains("call 2, 'barrier' on 'control' (barrier), has taken 1 s") &&
                            Contains(concat("missing are ranks ", late, ";")) &&
                            Contains(concat("rank ", late, " has submitted 1 call, last 'sum'")));
    const char* const patience = std::getenv("PATIENCE");
    CHECK(waited.count() < 1 + (patience ? std::atof(patience) : 1));  // the timeout and a second
  }
}

TEST_CASE("mpi: symmetric memory is booked, and mapped no longer than it is held", "[comm][mpi]") {
  const RaceCheck check;
  World world = World::mpi(check({}));
  Memory& memory = Memory::of(world.device());
  int after_first = 0;
  for (int i = 0; i < 100; ++i) {
    const auto arena = world.allocate_symmetric(10'000);
    CHECK(arena->bytes() == 12'288);
    CHECK(memory.reserved_bytes() == 12'288);
    arena->data()[9'999] = std::byte{1};
    if (i == 10) after_first = mappings();
  }
  CHECK(memory.reserved_bytes() == 0);
  // Each allocation held on to would be a mapping or more.
  CHECK(mappings() < after_first + 45);
}

TEST_CASE("mpi: ranks that ask for different sizes all hear of it", "[comm][mpi]") {
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    std::string message;
    const RaceCheck check;
    World world = World::mpi(check({.transport = transport}));
    try {
      world.allocate_symmetric(4096 + world.rank());
    } catch (const ContractError& error) {
      message = error.what();
    }
    CHECK_THAT(message, Contains("every rank must ask for the same"));
    CHECK(world.allocate_symmetric(4096)->bytes() == 4096);
  }
}

TEST_CASE("mpi: executors that cannot cross processes are refused", "[comm][mpi]") {
  for (const ExecutorChoice& executor :
       {testing::shuffled(0), ExecutorChoice(ExecutorKind::virtual_)})
    CHECK_THAT(thrown([](World&) {}, {.executor = executor}), Contains("ContractError"));
}

TEST_CASE("mpi: memory that outlives its world stays, and a collective says what is gone",
          "[comm][mpi]") {
  keeper();
  std::shared_ptr<SymmetricMemory> memory;
  std::optional<DeviceMesh> mesh;
  {
    World world = World::mpi();
    mesh = DeviceMesh::flat(world);
    // One rank's is enough to keep the others' mapped, too.
    auto made = world.allocate_symmetric(1 << 16);
    if (world.rank() == 0) memory = std::move(made);
  }
  if (memory) memory->data()[0] = memory->data()[memory->bytes() - 1] = std::byte{1};
  CHECK_THROWS_WITH(mesh->world().sum(1), Contains("its World has ended; keep the World"));
  CHECK_THROWS_WITH(mesh->world().allocate_symmetric(64), Contains("its World has ended"));
  memory.reset();
  mesh.reset();
  CHECK(keeper().sum(1) == keeper().size());
}
