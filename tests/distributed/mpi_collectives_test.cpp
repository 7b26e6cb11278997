// Collectives on tensors between processes. Run under mpirun; every rank runs all cases in the same
// order.
#include "tessera/distributed/collectives.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/distributed/exchange.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::RaceCheck;

TEST_CASE("mpi: collectives on tensors give every rank what the ranks' tensors make", "[mpi]") {
  keeper();
  for (const Transport transport : {Transport::automatic, Transport::messages}) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    for (const std::string& error : exchange::errors(world)) FAIL_CHECK(error);
    for (const std::string& error : exchange::errors_of_pieces(world)) FAIL_CHECK(error);
    std::vector<int> ranks;
    for (int r = world.size() - 1; r > 0; --r) ranks.push_back(r);
    if (world.rank() == 0) ranks = {0};
    for (const std::string& error : exchange::errors(*world.split("others", ranks)))
      FAIL_CHECK(error);
    world.barrier();
  }
}

TEST_CASE("mpi: ranks whose tensors differ hear of both in one line", "[mpi]") {
  keeper();
  for (const Transport transport : {Transport::automatic, Transport::messages}) {
    const std::string message = thrown(
        [](World& world) {
          const Shape shape = world.rank() == 1 ? Shape{3, 2} : Shape{2, 3};
          dist::all_reduce(Tensor::ones(shape, f32, world.device()), world);
          world.device().synchronize();
          world.barrier();
        },
        {.transport = transport});
    CHECK_THAT(message, Contains("CommError: ") && Contains("all_reduce f32 [2, 3]") &&
                            Contains("all_reduce f32 [3, 2]"));
    const std::string passed = thrown(
        [](World& world) {
          const int target = world.rank() == 1 ? 0 : 1;
          dist::send_recv(Tensor::ones({2}, f32, world.device()), 0, target, world);
          world.device().synchronize();
          world.barrier();
        },
        {.transport = transport});
    CHECK_THAT(passed, Contains("CommError: ") && Contains("to rank 0") && Contains("to rank 1"));
  }
}
