// No memory at every allocation of a step, on one rank and on all: a typed error, a reset, and the
// next step as ever.
#include <iostream>

#include "tests/promises/trials.hpp"
#include "tests/schedules/shuffled.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("out of memory at every allocation of a step is survived",
          "[promises][out_of_memory][threads]") {
  std::uint64_t tried = 0;
  for (const Cell& cell :
       {Cell{}, Cell{.reshard = Reshard::always, .keeps_gradients = true, .micro_batches = 3},
        Cell{.recomputes = true, .tied = true, .param = bf16, .reduce = bf16}})
    for (const int ranks : {1, 2}) {
      const ExecutorKind executor = ranks == 1 ? ExecutorKind::inlined : ExecutorKind::threaded;
      tried += try_all({.ranks = ranks,
                        .options = {.executor = executor, .threads = 1},
                        .trap = Trap::allocation},
                       cell);
    }
  for (const ExecutorChoice& executor :
       {ExecutorChoice(ExecutorKind::inlined), testing::shuffled(fresh_seed())})
    tried += try_all({.ranks = 3,
                      .options = {.executor = executor},
                      .trap = Trap::allocation,
                      .stride = 3 * stride()},
                     Cell{});
  std::cout << tried << " allocations failed\n";
  CHECK(tried >= at_least(500));
}
