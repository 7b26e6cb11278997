// A rank that gives up just before, inside or just after a collective of a step: its peers wake,
// all reset, and training goes on in the same process.
#include <iostream>

#include "tests/promises/trials.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("an abort before and after every collective of a step", "[promises][aborts][threads]") {
  std::uint64_t tried = 0;
  GridShare share;
  for (const Trap trap : {Trap::launch, Trap::body, Trap::finish})
    for (const ExecutorChoice& executor : executors(fresh_seed()))
      for (const int ranks : share.of({2, 3}))
        tried += try_all({.ranks = ranks,
                          .options = {.executor = executor},
                          .trap = trap,
                          .only_collectives = true},
                         Cell{.reshard = Reshard::always, .micro_batches = 3});
  std::cout << tried << " aborts around collectives\n";
  constexpr std::uint64_t kCells = 3 * 3 * 2;  // as above
  CHECK(tried >=
        std::max<std::uint64_t>(1, at_least(1500) * (kCells / GridShare::stride()) / kCells));
}
