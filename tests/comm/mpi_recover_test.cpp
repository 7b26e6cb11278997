// Worlds of processes after a failure, in the middle of what they were moving: nobody writes to
// memory that a collective has given up, and what it left on the way reaches no later one. Run
// under mpirun; every rank runs all cases in the same order.
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/comm/mpi_keeper.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using K = CollectiveKind;

namespace {

constexpr std::int64_t kCount = 3 << 19;  // floats of a chunk: more than a block of messages

// What each rank sends in a round; all elements are alike.
float value(int rank, int round) { return static_cast<float>(1 + rank + 16 * round); }

// A gather, a reduction and a sum, all at once, each on memory of its own.
class Traffic {
 public:
  explicit Traffic(World& world)
      : world_(world),
        n_(world.size()),
        arena_(world.allocate_symmetric((4 * n_ + 4) * kCount * 4)) {}

  void submit(int round) {
    const float mine = value(world_.rank(), round);
    std::fill_n(gathered() + world_.rank() * kCount, kCount, mine);
    std::fill_n(parts(), n_ * kCount, mine);
    std::fill_n(terms(), kCount, mine);
    world_.gather().submit({.send = gathered() + world_.rank() * kCount,
                            .recv = gathered(),
                            .count = kCount,
                            .kind = K::all_gather},
                           "gather", {});
    world_.reduce().submit(
        {.send = parts(), .recv = reduced(), .count = kCount, .kind = K::reduce_scatter}, "reduce",
        {});
    world_.control().submit(
        {.send = terms(), .recv = total(), .count = kCount, .kind = K::all_reduce}, "sum", {});
  }
  bool is_right(int round) const {
    float sum = 0;
    bool right = true;
    for (int r = 0; r < n_; ++r) {
      sum += value(r, round);
      right &= holds(gathered() + r * kCount, kCount, value(r, round));
    }
    return right && holds(reduced(), kCount, sum) && holds(total(), kCount, sum);
  }
  void poison() { std::fill_n(gathered(), all(), -1.f); }
  bool is_poison() const { return holds(gathered(), all(), -1.f); }

 private:
  static bool holds(const float* data, std::int64_t count, float expected) {
    return std::all_of(data, data + count, [=](float x) { return x == expected; });
  }
  std::int64_t all() const { return (2 * n_ + 4) * kCount; }
  float* gathered() const { return reinterpret_cast<float*>(arena_->data()); }
  float* parts() const { return gathered() + n_ * kCount; }
  float* reduced() const { return parts() + n_ * kCount; }
  float* terms() const { return reduced() + kCount; }
  float* total() const { return terms() + kCount; }

  World& world_;
  const int n_;
  std::shared_ptr<SymmetricMemory> arena_;
};

}  // namespace

TEST_CASE("mpi: collectives given up half-way leave nothing behind", "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  const int size = keeper().size(), rank = keeper().rank();
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    std::mt19937_64 draw(seed);
    // A nap may be over before the traffic begins, or after it has ended, on a fast machine more
    // often.
    double cut = 0;
    const testing::RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    for (int round = 0; round < 6 || (cut == 0 && round < 200); ++round) {
      const int thrower = static_cast<int>(draw() % static_cast<unsigned>(size));
      const std::chrono::microseconds nap(draw() % 6000);
      Traffic traffic(world);
      std::string cause;
      bool cut_here = false;
      try {
        world.barrier();
        traffic.submit(round);
        if (rank == thrower) {
          std::this_thread::sleep_for(nap);
          throw std::runtime_error("no luck");
        }
        world.device().synchronize();
        world.barrier();
      } catch (const std::exception&) {
        const FlightRecorder& calls = world.flight_recorder();
        cut_here = calls.last_started() > calls.last_done();
        cause = world.recover();
      }
      CHECK(cause == concat("rank ", thrower, " failed: no luck"));
      traffic.poison();
      CHECK(world.sum(1) == size);
      cut += world.sum(cut_here);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      CHECK(traffic.is_poison());
      traffic.submit(round + 1);
      world.device().synchronize();
      CHECK(traffic.is_right(round + 1));
      world.barrier();
    }
    CHECK(cut > 0);
  }
}

TEST_CASE("mpi: a rank that has ended comes to no recovery, and the others hear it",
          "[comm][mpi]") {
  for (const auto transport : {Transport::automatic, Transport::messages}) {
    const std::string message = thrown(
        [](World& world) {
          try {
            world.sum(1);  // over messages given up where a peer is through and fails already
          } catch (const CommError& error) {
            CHECK_THAT(error.what(), Contains("rank "));
          }
          if (world.rank() != 1) world.recover("the loss is NaN");
        },
        {.transport = transport});
    if (keeper().rank() == 1)
      CHECK_THAT(message, !Contains("has ended without it"));
    else
      CHECK_THAT(message, Contains("CommError") && Contains("has ended without it"));
  }
}
