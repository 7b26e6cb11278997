// What a failed step leaves behind after its reset: nothing. trials.hpp holds the ledger's bytes
// after every failure; here is all the rest. Tensors, nodes of the tape, slots, gates, messages and
// what waits to run are objects of the heap, and a clock is a value in one of them: so a leak of
// any kind is an object more, and one rank that runs bodies where they are submitted has as many
// after a failure as after the same failure once again.
#include <iostream>

#include "tests/promises/allocations.hpp"
#include "tests/promises/trials.hpp"

using namespace tessera;
using namespace tessera::testing;

// Where sanitizers own the heap nothing is counted; that of addresses has a report of leaks itself.
// Not under the race checker, whose books are on the same heap.
TEST_CASE("a failed step and its reset leave no object behind", "[promises]") {
  World world = World::single({.executor = ExecutorKind::inlined, .threads = 1});
  Trapper& trapper = Trapper::on(world);
  const Cell cell{.recomputes = true, .tied = true, .micro_batches = 3, .param = bf16};
  Trainee trainee(world, cell, 5);
  Subject subject(world, trainee.model(), trainee.optimizer(), trapper,
                  [&](int k) { return trainee.step(k).loss; });
  struct Held {
    std::int64_t objects, reserved_bytes;
    bool is_same;  // bits after the reset
    bool operator==(const Held&) const = default;
  };
  int tried = 0;
  for (const Trap trap : {Trap::launch, Trap::body, Trap::allocation}) {
    const std::uint64_t places = subject.count(trap);
    for (std::uint64_t k = first_place(places); k <= places; k += 5 * stride(), ++tried) {
      const auto after_failure = [&] {
        const bool is_same = subject.try_at(trap, k, true).is_same;
        const Allocations heap = allocations();
        return Held{heap.made - heap.freed, trainee.memory().reserved_bytes(), is_same};
      };
      const Held once = after_failure(), twice = after_failure();
      INFO(name(trap) << ' ' << k << ": " << once.objects << " objects");
      CHECK(once.is_same);
      CHECK(twice == once);
    }
  }
  std::cout << tried << " failures twice\n";
  CHECK(tried >= static_cast<int>(at_least(100)));
}
