// Meshes: who is where, who communicates with whom, and what is no mesh.
#include "tessera/comm/mesh.hpp"

#include <algorithm>
#include <mutex>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::run_checked;
using tessera::testing::thrown_by;
using MeshDims = std::vector<MeshDim>;
using Ranks = std::vector<int>;

namespace {

Ranks ranks_of(const RankGroup& group) { return {group.ranks().begin(), group.ranks().end()}; }
Ranks ranks_of(const DeviceMesh& mesh) { return {mesh.ranks().begin(), mesh.ranks().end()}; }

}  // namespace

TEST_CASE("a rank communicates along each dimension of a grid with the ranks of its line",
          "[comm]") {
  for (int rank = 0; rank < 24; ++rank) {
    INFO("rank " << rank);
    World world = World::emulated(rank, 24);
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{"pp", 2}, {"dp_replicate", 3}, {"dp_shard", 4}});
    const int pp = rank / 12, replica = rank / 4 % 3, shard = rank % 4;
    const int row = 12 * pp + 4 * replica, column = 12 * pp + shard;
    CHECK(mesh.ndim() == 3);
    CHECK(mesh.size() == 24);
    CHECK(mesh.is_member());
    CHECK(ranks_of(mesh.group("pp")) == Ranks{rank % 12, rank % 12 + 12});
    CHECK(ranks_of(mesh.group("dp_replicate")) == Ranks{column, column + 4, column + 8});
    CHECK(ranks_of(mesh.group("dp_shard")) == Ranks{row, row + 1, row + 2, row + 3});
    CHECK(mesh.group("pp").rank() == pp);
    CHECK(mesh.group("dp_replicate").rank() == replica);
    CHECK(mesh.group("dp_shard").rank() == shard);
    // Sub-meshes are made of the same groups, and cost nothing.
    const std::uint64_t calls = world.flight_recorder().last_submitted();
    const DeviceMesh part = mesh["dp_shard"];
    CHECK(part.ndim() == 1);
    CHECK(ranks_of(part) == Ranks{row, row + 1, row + 2, row + 3});
    CHECK(&part.group() == &mesh.group("dp_shard"));
    CHECK(part.shard_rank() == shard);
    CHECK(part.shard_size() == 4);
    const DeviceMesh turned = mesh.select({"dp_shard", "pp"});
    CHECK(turned.dims()[0].name == "dp_shard");
    Ranks expected;
    for (int s = 0; s < 4; ++s)
      for (int p = 0; p < 2; ++p) expected.push_back(12 * p + 4 * replica + s);
    CHECK(ranks_of(turned) == expected);
    CHECK(&turned["pp"].group() == &mesh.group("pp"));
    CHECK(world.flight_recorder().last_submitted() == calls);
  }
}

TEST_CASE("sums along the dimensions of a hybrid mesh of threads are those of its lines",
          "[comm][threads]") {
  run_checked(6, {.threads = 1}, [](World& world) {
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 3});
    double sums[] = {mesh.group("dp_replicate").sum(world.rank()),
                     mesh.group("dp_shard").sum(world.rank())};
    const int shard = world.rank() % 3, replica = world.rank() / 3;
    if (sums[0] != 2 * shard + 3 || sums[1] != 9 * replica + 3)
      throw std::logic_error("a sum is of other ranks");
    if (mesh.group("dp_replicate").reduce().stream() != StreamId::replicate)
      throw std::logic_error("replicas are not summed on their stream");
    const DeviceMesh again = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 3});
    if (&again.group("dp_shard") != &mesh.group("dp_shard"))
      throw std::logic_error("the same mesh has other groups");
  });
}

TEST_CASE("a mesh of five dimensions has a group along each, and one along neighbours as one",
          "[comm]") {
  for (int rank = 0; rank < 48; ++rank) {
    INFO("rank " << rank);
    World world = World::emulated(rank, 48);
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{"pp", 2}, {"dp", 3}, {"cp", 2}, {"ep", 1}, {"tp", 4}});
    const auto line = [&](int count, int stride) {
      Ranks ranks;
      const int first = rank - rank / stride % count * stride;
      for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
      return ranks;
    };
    CHECK(mesh.ndim() == 5);
    CHECK(ranks_of(mesh.group("pp")) == line(2, 24));
    CHECK(ranks_of(mesh.group("dp")) == line(3, 8));
    CHECK(ranks_of(mesh.group("cp")) == line(2, 4));
    CHECK(ranks_of(mesh.group("ep")) == Ranks{rank});
    CHECK(ranks_of(mesh.group("tp")) == line(4, 1));

    const DeviceMesh flat = mesh.flatten({"dp", "cp"}, "dp_cp", {.reduce = StreamId::replicate});
    CHECK(flat.ndim() == 4);
    CHECK(flat.to_string().starts_with("pp 2 x dp_cp 6 x ep 1 x tp 4\n"));
    CHECK(ranks_of(flat) == ranks_of(mesh));
    CHECK(ranks_of(flat.group("dp_cp")) == line(6, 4));
    CHECK(flat.group("dp_cp").reduce().stream() == StreamId::replicate);
    CHECK(&flat.group("pp") == &mesh.group("pp"));
    CHECK(&flat.group("tp") == &mesh.group("tp"));
    CHECK(ranks_of(flat.select({"dp_cp", "tp"})).size() == 24);
    CHECK(flat.select({"pp", "dp_cp"}).shard_rank() == rank % 24 / 4);
    CHECK(&mesh.flatten({"pp", "dp", "cp", "ep", "tp"}, "all").group() ==
          &DeviceMesh::flat(world).group());
    CHECK(ranks_of(mesh.select({"cp", "tp"}).flatten({"cp", "tp"}, "x").group()) == line(8, 1));
  }
}

TEST_CASE("sums along flattened dimensions are those of all their ranks", "[comm][threads]") {
  run_checked(8, {.threads = 1}, [](World& world) {
    const Ranks turned{7, 6, 5, 4, 3, 2, 1, 0};
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{"a", 2}, {"b", 2}, {"c", 2}}, turned).flatten({"b", "c"}, "bc");
    const double expected = world.rank() < 4 ? 0 + 1 + 2 + 3 : 4 + 5 + 6 + 7;
    if (mesh.group("bc").sum(world.rank()) != expected || mesh["bc"].group().size() != 4)
      throw std::logic_error("a sum is of other ranks");
    // On ranks that the mesh leaves out, too.
    const DeviceMesh some =
        DeviceMesh::grid(world, {{"x", 2}, {"y", 2}}, Ranks{0, 2, 4, 6}).flatten({"x", "y"}, "xy");
    if (some.is_member() != (world.rank() % 2 == 0)) throw std::logic_error("another member");
    if (some.is_member() && some.group().sum(1) != 4) throw std::logic_error("another sum");
  });
}

TEST_CASE("a mesh of ranks given by hand leaves the others out", "[comm][threads]") {
  std::mutex mutex;
  std::vector<std::string> heard;
  run_checked(5, {.threads = 1}, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}}, Ranks{4, 1, 0, 3});
    if (world.rank() == 2) {
      const std::lock_guard lock(mutex);
      heard = {thrown_by([&] { mesh.group("a"); }), thrown_by([&] { mesh["b"]; }),
               mesh.is_member() ? "a member" : ""};
      return;
    }
    const Ranks a = world.rank() % 4 == 0 ? Ranks{4, 0} : Ranks{1, 3};
    const Ranks b = world.rank() == 4 || world.rank() == 1 ? Ranks{4, 1} : Ranks{0, 3};
    if (ranks_of(mesh.group("a")) != a || ranks_of(mesh.group("b")) != b)
      throw std::logic_error("another line");
    if (mesh["a"].group().sum(1) != 2) throw std::logic_error("another sum");
  });
  CHECK_THAT(heard[0],
             Contains("rank 2 is not in the mesh of ranks 4 1 0 3; ask is_member() first"));
  CHECK_THAT(heard[1], Contains("rank 2 is not in the mesh"));
  CHECK(heard[2].empty());
}

TEST_CASE("a mesh of one dimension over all ranks has the world's communicators", "[comm]") {
  World world = World::emulated(1, 4);
  const DeviceMesh flat = DeviceMesh::flat(world);
  CHECK(&flat.group().gather() == &world.gather());
  CHECK(&flat.group() == &DeviceMesh::grid(world, {{"dp", 4}}).group());
  CHECK(&DeviceMesh::grid(world, {{"dp", 4}}, Ranks{3, 2, 1, 0}).group().gather() !=
        &world.gather());
  CHECK(world.flight_recorder().last_submitted() == 1);  // the last one's
  CHECK(&flat.world() == &DeviceMesh::flat(world).world());
}

TEST_CASE("what is no mesh is refused in one line, before anything is submitted", "[comm]") {
  World world = World::emulated(1, 8);
  const auto grid = [&](const MeshDims& dims) {
    const std::string message = thrown_by([&] { DeviceMesh::grid(world, dims); });
    CHECK(message.find('\n') == std::string::npos);
    return message;
  };
  CHECK_THAT(grid({{"a", 2}, {"b", 3}}),
             Contains("a 2 x b 3 is not 8, the number of ranks; give sizes whose product it is"));
  CHECK_THAT(grid({{"a", 1 << 30}, {"b", 1 << 30}, {"c", 1 << 30}}), Contains("is not 8"));
  CHECK_THAT(grid({}), Contains("0 dimensions; give 1 to 5"));
  CHECK_THAT(grid({{"a", 2}, {"b", 2}, {"c", 2}, {"d", 1}, {"e", 1}, {"f", 1}}),
             Contains("6 dimensions"));
  CHECK_THAT(grid({{"a", 2}, {"a", 4}}), Contains("called 'a' in a 2 x a 4; give each a name"));
  CHECK_THAT(grid({{"", 8}}), Contains("called ''"));
  CHECK_THAT(grid({{"world", 8}}), Contains("called 'world'"));
  CHECK_THAT(grid({{"a", -2}, {"b", -4}}), Contains("dimension 'a' has -2 ranks"));
  CHECK_THAT(thrown_by([&] { DeviceMesh::hybrid(world, {.replicate = 3, .shard = 2}); }),
             Contains("dp_replicate 3 x dp_shard 2 is not 8"));
  for (const Ranks& ranks : {Ranks{0, 1, 1, 2}, Ranks{0, 1, 2, 8}, Ranks{-1, 0, 1, 2}, Ranks{}})
    CHECK_THAT(thrown_by([&] { DeviceMesh::grid(world, {{"a", 4}}, ranks); }),
               Contains("give each once, from 0 to 7"));
  CHECK_THAT(thrown_by([&] { DeviceMesh::grid(world, {{"a", 4}}, Ranks{0, 1}); }),
             Contains("a 4 is not 2"));
  CHECK(world.flight_recorder().last_submitted() == 0);

  const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 4}});
  CHECK_THAT(thrown_by([&] { mesh["c"]; }), Contains("called 'c'; this mesh has 'a', 'b'"));
  CHECK_THAT(thrown_by([&] { mesh.group("c"); }), Contains("called 'c'"));
  CHECK_THAT(thrown_by([&] { mesh.select({"a", "a"}); }), Contains("'a' is chosen twice"));
  CHECK_THAT(thrown_by([&] { mesh.select({}); }), Contains("no name; this mesh has 'a', 'b'"));
  CHECK_THAT(
      thrown_by([&] { mesh.group(); }),
      Contains("a mesh of a 2 x b 4 has a group for each dimension; choose one, as mesh[\"b\"]"));

  const DeviceMesh cube = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}, {"c", 2}});
  CHECK_THAT(thrown_by([&] { cube.shard_group(); }),
             Contains("a 2 x b 2 x c 2 are 3 dimensions") && Contains("select({\"b\", \"c\"})"));
  const std::uint64_t calls = world.flight_recorder().last_submitted();
  CHECK_THAT(thrown_by([&] { cube.flatten({"a", "c"}, "d"); }),
             Contains("'c' does not follow the one before it; this mesh has 'a', 'b', 'c': give "
                      "neighbours in this order"));
  CHECK_THAT(thrown_by([&] { cube.flatten({"b", "a"}, "d"); }), Contains("'a' does not follow"));
  CHECK_THAT(thrown_by([&] { cube.flatten({"a", "d"}, "e"); }), Contains("called 'd'"));
  CHECK_THAT(thrown_by([&] { cube.flatten({"a", "b"}, "c"); }),
             Contains("called 'c' in c 4 x c 2; give each a name of its own"));
  CHECK_THAT(thrown_by([&] { cube.flatten({}, "d"); }), Contains("no name; this mesh has 'a'"));
  CHECK(world.flight_recorder().last_submitted() == calls);
}

TEST_CASE("a mesh prints its dimensions and its rows", "[comm]") {
  World world = World::emulated(0, 8);
  CHECK(DeviceMesh::hybrid(world, {.replicate = 2, .shard = 4}).to_string() ==
        "dp_replicate 2 x dp_shard 4\n 0 1 2 3\n 4 5 6 7\n");
  CHECK(DeviceMesh::grid(world, {{"a", 2}}, Ranks{5, 0}).to_string() == "a 2\n 5 0\n");
  World large = World::emulated(0, 2000, {.executor = ExecutorKind::virtual_});
  CHECK(DeviceMesh::grid(large, {{"a", 100}, {"b", 20}}).to_string() ==
        "a 100 x b 20\n 0 1 2 3 .. 19\n 20 21 22 23 .. 39\n 40 41 42 43 .. 59\n"
        " 60 61 62 63 .. 79\n ..\n 1980 1981 1982 1983 .. 1999\n");
}
