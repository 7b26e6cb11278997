// How a seed chooses: the mix, and what each way of it promises.
#include "tests/schedules/policy.hpp"

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::schedules;

namespace {

using Kind = SchedulePolicy::Kind;

// Ready actors of 2 ranks with a host and three streams each, a random part of them, never none.
class Actors {
 public:
  explicit Actors(std::uint64_t seed) : engine_(seed) {}
  const std::vector<Candidate>& next() {
    ready_.clear();
    while (ready_.empty())
      for (int rank = 0; rank < 2; ++rank)
        for (int actor = 0; actor < 4; ++actor)
          if (engine_() % 2 == 0) ready_.push_back({rank, actor});
    return ready_;
  }

 private:
  std::mt19937_64 engine_;
  std::vector<Candidate> ready_;
};

int id(const Candidate& c) { return c.rank * 4 + c.actor; }

// A seed of this kind, and its policy.
std::uint64_t seed_of(Kind kind, std::uint64_t from) {
  while (SchedulePolicy(from).kind() != kind) ++from;
  return from;
}

// For each pair of actors: how often the first was taken while the second was ready too.
using Preferred = std::array<std::array<int, 8>, 8>;
Preferred preferences(std::uint64_t seed, int first, int count) {
  SchedulePolicy policy(seed);
  Actors actors(seed);
  Preferred preferred{};
  for (int i = 0; i < first + count; ++i) {
    const auto& ready = actors.next();
    const Candidate taken = ready[policy.choose(ready)];
    for (const Candidate& c : ready)
      if (i >= first && id(c) != id(taken)) ++preferred[id(taken)][id(c)];
  }
  return preferred;
}

}  // namespace

TEST_CASE("seeds choose their way by the mix") {
  constexpr int kSeeds = 20000;
  const std::uint64_t first = testing::fresh_seed();
  INFO("first seed " << first);
  std::array<int, 5> count{};
  for (std::uint64_t s = first; s < first + kSeeds; ++s)
    ++count[static_cast<std::size_t>(SchedulePolicy(s).kind())];
  const double share[] = {0.1, 0.5, 0.2, 0.1, 0.1};
  for (std::size_t k = 0; k < count.size(); ++k) {
    // Six standard deviations of a binomial count.
    const double expected = share[k] * kSeeds, bound = 6 * std::sqrt(expected * (1 - share[k]));
    CHECK(std::abs(count[k] - expected) < bound);
  }
}

TEST_CASE("a starved actor goes only when it is alone, a favoured one always") {
  const std::uint64_t from = testing::fresh_seed();
  for (const Kind kind : {Kind::starve, Kind::favour}) {
    const std::uint64_t seed = seed_of(kind, from);
    INFO("seed " << seed);
    // All actors have been met after 200 choices, but with a probability below 2^-150.
    const Preferred p = preferences(seed, 200, 1000);
    int extremes = 0;
    for (std::size_t a = 0; a < 8; ++a) {
      bool is_extreme = true;
      for (std::size_t b = 0; b < 8; ++b)
        if (a != b) is_extreme &= kind == Kind::starve ? p[a][b] == 0 : p[b][a] == 0;
      extremes += is_extreme;
    }
    CHECK(extremes == 1);
  }
}

TEST_CASE("between demotions the order of actors is fixed, a demotion puts one last") {
  std::uint64_t from = testing::fresh_seed();
  INFO("seeds from " << from);
  for (const Kind kind : {Kind::demote_once, Kind::demote_twice}) {
    // Nothing turns for a seed whose demotion comes among the first or last few choices of the
    // span, or finds alone the actor that is last already: for 1 or 2 % of seeds, never for 8 in a
    // row.
    int turning = 0;
    for (int round = 0; round < 8; ++round) {
      const std::uint64_t seed = seed_of(kind, from);
      from = seed + 1;
      // In the span [1024, 2048) each pair keeps its order, but for the actors that are demoted.
      const Preferred p = preferences(seed, 1023, 1024);
      int turned = 0;
      for (std::size_t a = 0; a < 8; ++a)
        for (std::size_t b = 0; b < a; ++b) turned += p[a][b] > 0 && p[b][a] > 0;
      CHECK(turned <= (kind == Kind::demote_once ? 7 : 14));
      turning += turned > 0;
    }
    CHECK(turning > 0);
  }
}

TEST_CASE("the same seed gives the same choices") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  for (std::uint64_t s = seed; s < seed + 20; ++s)
    CHECK(preferences(s, 0, 300) == preferences(s, 0, 300));
}
