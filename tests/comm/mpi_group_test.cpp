// Groups of ranks that are processes. Run under mpirun; every rank runs all cases in the same
// order.
#include <map>
#include <random>
#include <stdexcept>

#include "tessera/comm/mesh.hpp"
#include "tests/comm/battery.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::RaceCheck;

namespace {

constexpr Transport kTransports[] = {Transport::automatic, Transport::messages};

std::vector<int> backwards(const World& world) {
  std::vector<int> ranks;
  for (int r = world.size() - 1; r >= 0; --r) ranks.push_back(r);
  return ranks;
}

}  // namespace

TEST_CASE("mpi: a group of any ranks has the bits of a world of threads of as many",
          "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  const int size = keeper().size() - 1;
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(size, seed);
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    const std::vector<int> ranks = others(world);
    const RankGroup& group = *world.split("others", ranks);
    CHECK(group.ranks()[static_cast<std::size_t>(group.rank())] == world.rank());
    const battery::Result result = battery::run(group, seed);
    for (const std::string& error : result.errors) FAIL_CHECK(error);
    if (world.rank() > 0) CHECK(result.hash == threads[static_cast<std::size_t>(group.rank())]);
    CHECK(&group == world.split("others", ranks));
    const std::vector<int> first = world.rank() == 0 ? ranks : std::vector<int>{};
    CHECK((world.split("first", first) != nullptr) == (world.rank() == 0));
    CHECK((world.split("first", first) != nullptr) == (world.rank() == 0));
    world.barrier();
  }
}

TEST_CASE("mpi: ranks of a group that disagree are named as the world counts them", "[comm][mpi]") {
  for (const Transport transport : kTransports) {
    const std::string message = thrown(
        [](World& world) {
          const RankGroup& group = *world.split("all", backwards(world));
          group.control().submit({.kind = CollectiveKind::barrier},
                                 world.rank() == 1 ? "odd" : "even", {});
          world.device().synchronize();
          world.barrier();
        },
        {.transport = transport});
    CHECK_THAT(message, Contains("'control of all'") && Contains("'odd'") && Contains("'even'") &&
                            Contains("rank 1 submitted"));
  }
}

TEST_CASE("mpi: lists of ranks that do not fit together are refused on every rank", "[comm][mpi]") {
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.transport = transport}));
    std::vector<int> ranks = others(world);
    if (world.rank() == 0) ranks = {0, 1};
    CHECK_THROWS_WITH(world.split("some", ranks),
                      Contains("rank 0 gives a group of 2 ranks, but 1 of them give it"));
    world.barrier();
  }
}

TEST_CASE("mpi: a rank that fails while a group waits for it is named to all", "[comm][mpi]") {
  for (const Transport transport : kTransports) {
    const int thrower = keeper().size() - 1;
    const std::string message = thrown(
        [&](World& world) {
          const RankGroup& group = *world.split("others", others(world));
          if (world.rank() == thrower) throw std::runtime_error("the disk is full");
          group.barrier();
          world.barrier();
        },
        {.transport = transport});
    if (keeper().rank() == thrower)
      CHECK(message == "the disk is full");
    else
      CHECK_THAT(message, Contains(concat("rank ", thrower, " failed")));
  }
}

TEST_CASE("mpi: groups go on after a recovery of their world", "[comm][mpi]") {
  keeper();
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    const RankGroup& group = *world.split("others", others(world));
    for (int round = 0; round < 2 * world.size(); ++round) {
      try {
        group.sum(1);
        if (world.rank() == round % world.size()) throw std::runtime_error("no luck");
        group.sum(2);
        world.sum(3);
      } catch (const std::exception&) {
        world.recover();
      }
      CHECK(group.sum(1) == group.size());
      CHECK(world.sum(1) == world.size());
      keeper().barrier();  // over messages a peer that fails next would cut the sum short
    }
  }
}

TEST_CASE("mpi: a mesh of processes has groups along its dimensions", "[comm][mpi]") {
  keeper();
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    const int n = world.size(), shard = n % 2 == 0 ? n / 2 : n;
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = n / shard, .shard = shard});
    const int first = world.rank() / shard * shard, column = world.rank() % shard;
    CHECK(mesh.group("dp_shard").sum(world.rank()) == shard * first + shard * (shard - 1) / 2);
    CHECK(mesh.group("dp_replicate").max(world.rank()) == column + n - shard);
    const DeviceMesh last = DeviceMesh::grid(world, {{"last", 1}}, std::vector<int>{n - 1});
    CHECK(last.is_member() == (world.rank() == n - 1));
  }
}

TEST_CASE("mpi: memory of a group that outlives its world stays", "[comm][mpi]") {
  keeper();
  std::shared_ptr<const World> kept;
  std::shared_ptr<SymmetricMemory> memory;
  {
    World world = World::mpi();
    kept = world.share();
    memory = world.split("others", others(world))->allocate_symmetric(1 << 16);
  }
  memory->data()[0] = memory->data()[memory->bytes() - 1] = std::byte{1};
  memory.reset();
  kept.reset();
  CHECK(keeper().sum(1) == keeper().size());
}
