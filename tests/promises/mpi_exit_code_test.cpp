// A failure that no host call waits for ends every process with the exit code of threads. Run under
// mpirun; every rank runs all cases in the same order.
#include "tessera/base/log.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/promises/unread_step.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("mpi: a failure behind the last value that is read ends every process with 1",
          "[mpi][mpi_exceptions]") {
  keeper();
  std::uint64_t places = 0;
  CHECK(exit_code_of({}, &places) == 0);
  const auto last = static_cast<std::uint64_t>(-keeper().max(-static_cast<double>(places)));
  const auto first =
      static_cast<std::uint64_t>(keeper().max(static_cast<double>(first_place(last))));
  for (const Trap trap : {Trap::launch, Trap::body})
    for (std::uint64_t k = first; k <= last; k += 7 * stride()) {
      INFO(name(trap) << ' ' << k << " of " << last);
      const int trapped = static_cast<int>(k % static_cast<std::uint64_t>(keeper().size()));
      CHECK(exit_code_of({.trap = trap, .place = k, .trapped = trapped}) == 1);
    }
}

TEST_CASE("mpi: a rank that ends early, or submits what its peers do not, ends all with 1",
          "[mpi][mpi_exceptions]") {
  keeper();
  const std::string what = GENERATE("nothing", "ends early", "submits more", "steps alone");
  INFO(what);
  const int code =
      run({.program = "a rank of this test", .world = {.threads = 1}}, [&](World& world) {
        const bool is_odd = world.rank() == 1;
        nn::Linear model(4, 4);
        fully_shard(model, {.mesh = DeviceMesh::flat(world)});
        model.materialize(world.device());
        nn::init(model, {1});
        optim::AdamW optimizer(model.parameters(), {.lr = 0.1});
        const Tensor x = Tensor::ones({2, 4}, f32, world.device());
        mean(square(model(x))).backward();
        optimizer.step();
        if (is_odd && what == "ends early") return;
        if (!is_odd && what == "ends early") model(x);
        if (is_odd && what == "submits more")
          world.control().submit({.kind = CollectiveKind::barrier}, "of rank 1 alone", {});
        if (is_odd && what == "steps alone") optimizer.step();
      });
  set_log_sink({});
  CHECK(code == (what == "nothing" ? 0 : 1));
}
