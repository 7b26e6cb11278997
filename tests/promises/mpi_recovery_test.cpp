// Ranks that are processes reset as threads do. Run under mpirun; every rank runs all cases in the
// same order.
#include <iostream>

#include "tests/promises/trials.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Keeps MPI alive while the worlds of the cases come and go.
World& keeper() {
  static World world = World::mpi();
  return world;
}

}  // namespace

TEST_CASE("mpi: an exception anywhere in a step: a reset, and training goes on", "[mpi]") {
  const int size = keeper().size(), rank = keeper().rank();
  std::uint64_t tried = 0;
  for (const auto executor : {ExecutorKind::threaded, ExecutorKind::inlined})
    for (const Trap trap : {Trap::launch, Trap::body, Trap::allocation}) {
      World world = World::mpi({.executor = executor, .threads = 1});
      Trapper& trapper = Trapper::on(world);
      Trainee trainee(world, {.recomputes = true}, 5);
      Subject subject(world, trainee.model(), trainee.optimizer(), trapper,
                      [&](int k) { return trainee.step(k).loss; });
      const auto last =
          static_cast<std::uint64_t>(-world.max(-static_cast<double>(subject.count(trap))));
      const std::uint64_t stride = 7 * kStride;
      for (std::uint64_t k = 1; k <= last; k += stride, ++tried) {
        const int turn = static_cast<int>(k / stride) % (size + 1);
        const int trapped = turn == size ? -1 : turn;
        const Heard heard = subject.try_at(trap, k, trapped < 0 || trapped == rank);
        const bool any_updated = world.max(heard.has_updated) != 0;
        INFO(name(executor) << ", " << name(trap) << ' ' << k << ", trap on rank " << trapped);
        CHECK(complaint(heard, rank, trapped, cause_of(trap), any_updated) == "");
        // The same on every rank.
        CHECK(world.sum(heard.is_whole) == (heard.is_whole ? size : 0));
        CHECK(world.max(static_cast<double>(heard.steps)) == static_cast<double>(heard.steps));
      }
    }
  if (rank == 0) std::cout << tried << " exceptions between processes\n";
  CHECK(tried >= 100 / kStride);
}

TEST_CASE("mpi: ranks that exchange messages can't be woken, and the error says so", "[mpi]") {
  keeper();
  World world = World::mpi({.transport = Transport::messages});
  world.sum(1);
  CHECK_THROWS_WITH(world.recover("the disk is full"),
                    Contains("the ranks exchange MPI messages") && Contains("the disk is full"));
}
