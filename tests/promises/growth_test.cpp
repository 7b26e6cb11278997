// Memory over many steps and at any speed: the plan holds on slow hosts, slow kernels and slow
// wires, nothing grows, and what one unit at a time needs does not depend on how many there are.
#include <unistd.h>

#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <thread>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tests/promises/allocations.hpp"
#include "tests/promises/memory.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Sleeps before every operation of some streams, on their worker, or on the host when it submits.
class Slow final : public Observer {
 public:
  enum class What : std::uint8_t { host, compute, wire };
  Slow(DeviceContext& context, What what) : context_(context), what_(what) {
    context_.add_observer(*this);
  }
  ~Slow() override { context_.remove_observer(*this); }

  void launched(StreamId, Tick, const Op&) override {
    if (what_ == What::host) rest();
  }
  void started(StreamId stream, Tick, const char*) override {
    const bool computes = stream == StreamId::compute;
    if (what_ == What::compute ? computes : what_ == What::wire && !computes) rest();
  }

 private:
  static void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  DeviceContext& context_;
  What what_;
};

// All that could grow, after a step.
struct Held {
  std::int64_t live, reserved, peak;
  std::uint64_t segments, gates;
  bool operator==(const Held&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Held& h) {
  return out << "live " << h.live << ", reserved " << h.reserved << ", peak " << h.peak
             << ", segments " << h.segments << ", gates " << h.gates;
}
Held held_after_step(Trainee& trainee, const World& world, int k) {
  Memory& memory = trainee.memory();
  memory.ledger().reset_peak();
  trainee.step(k);
  world.device().synchronize();
  return {memory.ledger().live_bytes(), memory.reserved_bytes(), memory.ledger().peak_bytes(),
          memory.pool().segments_taken(), memory.pool().gates_fired()};
}

// What the process holds besides.
struct Process {
  std::int64_t descriptors, threads, heap_bytes;
};
std::ostream& operator<<(std::ostream& out, const Process& p) {
  return out << p.descriptors << " descriptors, " << p.threads << " threads, " << p.heap_bytes
             << " bytes of heap";
}
// Adds what there is while every rank is idle; rank 0 looks, for to look opens files. Collective.
void add_process_at_rest(const World& world, std::vector<Process>& seen) {
  const auto entries = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  world.device().synchronize();
  world.barrier();
  if (world.rank() == 0) {
    const std::int64_t heap_bytes = allocations().held_bytes;
    seen.push_back({entries("/proc/self/fd"), entries("/proc/self/task"), heap_bytes});
  }
  world.barrier();
}

// Bytes that a device holds of the system: segments of its pool, staging, symmetric memory.
class Acquired final : public Observer {
 public:
  explicit Acquired(DeviceContext& context) : context_(context) { context_.add_observer(*this); }
  ~Acquired() override { context_.remove_observer(*this); }

  void memory(const MemoryEvent& event) override {
    const std::int64_t size =
        static_cast<const std::byte*>(event.end) - static_cast<const std::byte*>(event.begin);
    if (event.kind == MemoryEvent::Kind::acquired) bytes_ += size;
    if (event.kind == MemoryEvent::Kind::released) bytes_ -= size;
  }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  DeviceContext& context_;
  std::int64_t bytes_ = 0;
};

// The least that the process holds over some steps: where nobody waits for the device, it goes up
// and down with how far ahead the host is.
struct LeastHeld {
  std::int64_t heap_bytes = std::numeric_limits<std::int64_t>::max(), resident_bytes = heap_bytes;

  void look() {
    heap_bytes = std::min(heap_bytes, allocations().held_bytes);
    std::int64_t all_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
    resident_bytes = std::min(resident_bytes, resident_pages * sysconf(_SC_PAGESIZE));
  }
};
std::ostream& operator<<(std::ostream& out, const LeastHeld& held) {
  return out << held.heap_bytes << " bytes of heap, " << held.resident_bytes << " resident";
}

// What two ranks hold, threads whose streams have workers that run every body, in a training that
// reads no value: at a tenth of the steps and at the end.
struct Unread {
  LeastHeld early, late;  // each over a twentieth of the steps
  std::vector<std::pair<std::int64_t, std::int64_t>> acquired;  // by rank, then and at the end
};
enum class LeftByStep : std::uint8_t { nothing, an_event };
Unread train_unread(int steps, LeftByStep left) {
  Unread found;
  found.acquired.resize(2);
  run_local(2, {.threads = 1}, [&](World& world) {
    const Acquired acquired(world.device().context());
    auto& [early, late] = found.acquired[static_cast<std::size_t>(world.rank())];
    Trainee trainee(world, {.layers = 1}, 5);
    std::deque<Event> events;
    for (int k = 1; k <= steps; ++k) {
      trainee.step(k);
      if (left == LeftByStep::an_event) events.push_back(world.device().compute().record());
      if (k == steps / 10) early = acquired.bytes();
      late = acquired.bytes();
      if (world.rank() > 0) continue;
      if (k > steps / 20 && k <= steps / 10) found.early.look();
      if (k > steps - steps / 20) found.late.look();
    }
    world.barrier();  // rank 1 holds its model until rank 0 has looked
  });
  return found;
}
// What every step leaves behind, or every second, is at least the 24 bytes of malloc's smallest
// block.
std::int64_t least_left(int steps) { return 24 * (steps - steps / 10) / 2; }

std::int64_t at_peak(const Phase& step, const std::set<std::string>& owners) {
  std::int64_t bytes = 0;
  for (const auto& [owner, held] : step.owners)
    if (owners.contains(owner)) bytes += held;
  return bytes;
}

}  // namespace

TEST_CASE("neither a slow host nor slow kernels nor a slow wire changes a byte of the plan",
          "[promises][threads]") {
  const std::vector<Cell> some = {{},
                                  {.reshard = Reshard::never, .recomputes = true},
                                  {.tied = true, .micro_batches = 3},
                                  {.recomputes = true, .tied = true, .param = bf16},
                                  {.layers = 4, .prefetch_depth = 3, .reductions_in_flight = 2}};
  const auto what = GENERATE(Slow::What::host, Slow::What::compute, Slow::What::wire);
  GridShare share;
  for (const Cell& cell : some)
    for (const int ranks : share.of({2, 3})) {
      INFO(cell << ", " << ranks << " ranks, slow " << static_cast<int>(what));
      const auto measured = on_ranks(ranks, [&](World& world) {
        const Slow slow(world.device().context(), what);
        const Phases phases = measure(world, cell);
        world.device().synchronize();
        return phases;
      });
      for (int rank = 0; rank < ranks; ++rank) {
        const World plan = World::emulated(rank, ranks, {.executor = ExecutorKind::virtual_});
        CHECK(measure(plan, cell) == measured[static_cast<std::size_t>(rank)]);
      }
    }
}

TEST_CASE("nothing grows over 2,000 steps", "[promises][steady]") {
  constexpr int kEarly = 10;
  const Cell other{.recomputes = true, .micro_batches = 3, .param = bf16};
  const auto [cell, last] =
      GENERATE_COPY(std::pair(Cell{}, long_run(2000)), std::pair(other, long_run(500)));
  INFO(cell);
  const int part = (last - kEarly) / 4;
  std::vector<Process> seen;  // after kEarly steps and after each further `part`
  seen.reserve(5);
  const auto grown = on_ranks(2, [&, cell = cell, last = last](World& world) {
    Trainee trainee(world, cell, 5);
    std::pair<Held, Held> held;
    for (int k = 1; k <= last; ++k) {
      const Held now = held_after_step(trainee, world, k);
      if (k == kEarly) held.first = now;
      held.second = now;
      if (k >= kEarly && (k - kEarly) % part == 0) add_process_at_rest(world, seen);
    }
    return held;
  });
  // A list that keeps the largest size it ever needed grows once in a while, when a rank happens to
  // run far ahead. What is left behind by every step, or by every second, is there in each part: at
  // least the 24 bytes of malloc's smallest block.
  REQUIRE(seen.size() == 5);
  std::int64_t least_bytes = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 1; i < seen.size(); ++i) {
    INFO(seen[0] << ", then " << seen[i]);
    CHECK(seen[i].descriptors == seen[0].descriptors);
    CHECK(seen[i].threads == seen[0].threads);
    least_bytes = std::min(least_bytes, seen[i].heap_bytes - seen[i - 1].heap_bytes);
  }
  CHECK(least_bytes < 24 * (part / 2));
  for (const auto& [early, late] : grown) {
    CHECK(early == late);
    CHECK(late.peak > late.live);
  }
}

// One rank that runs every body where it is submitted: what the heap holds is then a function of
// the program. Where sanitizers own the heap nothing is counted and all counts are 0. Not under the
// race checker, whose books are on the same heap.
TEST_CASE("the heap does not grow over 2,000 steps, and steady steps ask it for the same",
          "[promises][steady]") {
  const World world = World::emulated(0, 2, {.executor = ExecutorKind::inlined, .threads = 1});
  Trainee trainee(world, {}, 5);
  struct {
    std::int64_t live, asked;
  } early{}, late{};
  std::int64_t before = 0;
  for (int k = 1; k <= long_run(2000); ++k) {
    before = allocations().made;
    trainee.step(k);
    world.device().synchronize();
    late = {allocations().made - allocations().freed, allocations().made - before};
    if (k == 20) early = late;  // the engine remembers how the last eight steps went
  }
  INFO("a steady step asks the heap " << late.asked << " times");
  CHECK(early.live == late.live);
  CHECK(early.asked == late.asked);
}

// The host learns what has run from the root's forwards alone. The executor runs no bodies, so that
// what the host holds is all that there is.
TEST_CASE("over 10,000 steps without a read by the program nothing grows on the host",
          "[promises][steady]") {
  const Cell cell = GENERATE(Cell{}, Cell{.recomputes = true, .micro_batches = 2, .param = bf16});
  INFO(cell);
  const World world = World::emulated(0, 2, {.executor = ExecutorKind::virtual_, .threads = 1});
  Trainee trainee(world, cell, 5);
  std::int64_t early = 0, late = 0, reserved = 0;
  for (int k = 1; k <= long_run(10000); ++k) {
    trainee.step(k);
    late = allocations().made - allocations().freed;
    if (k == 10) early = late, reserved = trainee.memory().reserved_bytes();
  }
  CHECK(early == late);
  CHECK(trainee.memory().reserved_bytes() == reserved);
}

// Where sanitizers own the heap nothing is counted, and what is resident is theirs. Half a MiB is
// for pages of stacks and of malloc's arenas that are touched for the first time.
TEST_CASE("over 10,000 steps of two ranks without a read nothing grows",
          "[promises][steady][threads]") {
  const bool is_counted = allocations().made > 0;
  const int steps = is_counted && stride() <= 5 ? 10000 : long_run(10000);
  const auto [early, late, acquired] = train_unread(steps, LeftByStep::nothing);
  INFO(steps << " steps: " << early << ", then " << late);
  if (is_counted) {
    CHECK(late.heap_bytes - early.heap_bytes < least_left(steps));
    CHECK(late.resident_bytes - early.resident_bytes < 1 << 19);
  }
  for (const auto& [before, after] : acquired) CHECK(before == after);
}

TEST_CASE("an event that every step of two ranks leaves behind is seen", "[promises]") {
  const bool is_counted = allocations().made > 0;
  constexpr int kSteps = 200;
  const auto [early, late, acquired] = train_unread(kSteps, LeftByStep::an_event);
  INFO(early << ", then " << late);
  CHECK((late.heap_bytes - early.heap_bytes > least_left(kSteps) || !is_counted));
}

TEST_CASE("what computing one unit after another needs does not depend on depth", "[promises]") {
  const auto what = GENERATE(Reshard::automatic, Reshard::always);
  const bool recomputes = GENERATE(false, true);
  const auto plan = [&](std::int64_t layers) {
    const World world = World::emulated(1, 3, {.executor = ExecutorKind::virtual_});
    return measure(world, {.reshard = what, .recomputes = recomputes, .layers = layers})
        .steps.back();
  };
  const Phase two = plan(2), five = plan(5), eight = plan(8);
  INFO(two << '\n' << five << '\n' << eight);
  // Gathered parameters, gradients on the wire, the batch.
  const std::set<std::string> working = {"gather slots", "gradient slots", "staging", "batch",
                                         "host staging"};
  CHECK(at_peak(two, working) == at_peak(eight, working));
  CHECK(at_peak(two, working) > 0);
  // The rest is what a layer adds: its state, and what its forward keeps.
  CHECK(eight.peak - five.peak == five.peak - two.peak);
}
