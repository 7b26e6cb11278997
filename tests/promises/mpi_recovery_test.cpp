// Ranks that are processes reset as threads do. Run under mpirun; every rank runs all cases in the
// same order.
#include <chrono>
#include <iostream>
#include <thread>

#include "tests/comm/mpi_keeper.hpp"
#include "tests/promises/trials.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Plan {
  Transport transport;
  ExecutorKind executor;
  Trap trap;
  bool only_collectives;
  std::uint64_t stride;
};

// Returns how many places were tried, each on one rank or on all.
std::uint64_t try_places(const Plan& plan) {
  const int size = keeper().size(), rank = keeper().rank();
  const RaceCheck check;
  World world =
      World::mpi(check({.executor = plan.executor, .threads = 1, .transport = plan.transport}));
  Trapper& trapper = Trapper::on(world);
  Trainee trainee(world, {.recomputes = true}, 5);
  Subject subject(world, trainee.model(), trainee.optimizer(), trapper,
                  [&](int k) { return trainee.step(k).loss; });
  const auto places = static_cast<double>(subject.count(plan.trap, plan.only_collectives));
  const auto last = static_cast<std::uint64_t>(-world.max(-places));
  const auto first = static_cast<std::uint64_t>(world.max(static_cast<double>(first_place(last))));
  std::uint64_t tried = 0;
  for (std::uint64_t k = first; k <= last; k += plan.stride, ++tried) {
    const int turn = static_cast<int>(k / plan.stride) % (size + 1);
    const int trapped = turn == size ? -1 : turn;
    const Heard heard =
        subject.try_at(plan.trap, k, trapped < 0 || trapped == rank, plan.only_collectives);
    const bool any_updated = world.max(heard.has_updated) != 0;
    INFO((plan.transport == Transport::messages ? "messages, " : "shared memory, ")
         << name(plan.executor) << ", " << name(plan.trap) << ' ' << k << ", trap on rank "
         << trapped);
    CHECK(complaint(heard, rank, trapped, cause_of(plan.trap), any_updated) == "");
    // The same on every rank.
    CHECK(world.sum(heard.is_whole) == (heard.is_whole ? size : 0));
    CHECK(world.max(static_cast<double>(heard.steps)) == static_cast<double>(heard.steps));
  }
  return tried;
}

}  // namespace

TEST_CASE("mpi: an exception anywhere in a step: a reset, and training goes on",
          "[mpi][mpi_exceptions]") {
  std::uint64_t tried = 0;
  for (const auto transport : {Transport::automatic, Transport::messages})
    for (const auto executor : {ExecutorKind::threaded, ExecutorKind::inlined})
      for (const Trap trap : {Trap::launch, Trap::body, Trap::allocation})
        // A failed body of an inline executor is where ranks have waited for each other.
        tried += try_places(
            {transport, executor, trap, false,
             (executor == ExecutorKind::inlined && trap == Trap::body ? 2 : 11) * stride()});
  if (keeper().rank() == 0) std::cout << tried << " exceptions between processes\n";
  CHECK(tried >= at_least(100));
}

TEST_CASE("mpi: an abort before and after every collective of a step", "[mpi][mpi_aborts]") {
  std::uint64_t tried = 0;
  for (const auto transport : {Transport::automatic, Transport::messages})
    for (const Trap trap : {Trap::launch, Trap::body, Trap::finish})
      tried += try_places({transport, ExecutorKind::threaded, trap, true, stride()});
  if (keeper().rank() == 0) std::cout << tried << " aborts around collectives\n";
  CHECK(tried >= at_least(90));
}

TEST_CASE("mpi: an update that every process has made runs to its end when the next step fails",
          "[mpi][mpi_exceptions]") {
  const int size = keeper().size(), rank = keeper().rank();
  for (int trial = 0; trial < 2 * size; ++trial) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    Stack model({4, 6, 3});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    optim::AdamW optimizer(model.parameters());
    ShardReset found;
    found.parameters_are_consistent = false;
    try {
      if (rank == trial / 2)  // late, so that the others halt before it has come so far
        world.device().compute().launch({.name = "nap"}, [](Exec&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        });
      for (int step = 0;; ++step) {
        if (step == 1 && rank == trial % size) throw Sprung();
        mean_square(model(rows_of(7, rank, 2, 4, world.device()))).backward();
        optimizer.step();
        optimizer.zero_grad();
        if (step == 1) world.barrier();
      }
    } catch (const std::exception&) {
      found = reset(model);
    }
    INFO("trial " << trial);
    CHECK(found.parameters_are_consistent);
    CHECK(optimizer.steps() == 1);
  }
}
