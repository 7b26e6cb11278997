#include "tests/schedules/policy.hpp"

#include <algorithm>
#include <bit>

#include "tessera/base/philox.hpp"
#include "tessera/device/clock.hpp"

namespace tessera::schedules {
namespace {

using Kind = SchedulePolicy::Kind;

// Actors of a rank: its host and room for eight streams, so that a seed which is kept in a file
// means the same schedule whatever the number of streams.
constexpr std::size_t kActors = 9;
static_assert(1 + kMaxStreams <= kActors);
constexpr std::uint64_t kDrawn = std::uint64_t{1} << 32;  // priorities from here on are drawn
// Streams of the generator: what is drawn from the seed alone, for actors, and for spans.
constexpr std::uint64_t kOfSeed = 1, kOfActors = 2, kOfSpans = 3;

Kind kind_of(std::uint64_t seed) {
  constexpr Kind kMix[] = {Kind::even,         Kind::demote_once,  Kind::demote_once,
                           Kind::demote_once,  Kind::demote_once,  Kind::demote_once,
                           Kind::demote_twice, Kind::demote_twice, Kind::starve,
                           Kind::favour};
  return kMix[philox(seed, 0, kOfSeed)[0] % std::size(kMix)];
}

std::size_t scaled(std::uint32_t draw, std::size_t count) {
  return static_cast<std::size_t>((std::uint64_t{draw} * count) >> 32);
}

}  // namespace

SchedulePolicy::SchedulePolicy(std::uint64_t seed)
    : seed_(seed), kind_(kind_of(seed)), lowest_(kDrawn) {}

std::size_t SchedulePolicy::choose(std::span<const Candidate> ready) {
  ++choices_;
  if (kind_ == Kind::demote_once || kind_ == Kind::demote_twice) {
    if (std::has_single_bit(choices_)) plan_demotions();
    const int count = kind_ == Kind::demote_once ? 1 : 2;
    for (int i = 0; i < count; ++i)
      if (choices_ == demotions_[static_cast<std::size_t>(i)])
        priority(ready[first_by_priority(ready)]) = --lowest_;
    return first_by_priority(ready);
  }
  const std::uint32_t draw = philox(seed_, choices_)[0];
  if (kind_ == Kind::even) return scaled(draw, ready.size());

  for (const Candidate& c : ready) extreme_ = std::max(extreme_, priority(c));
  const auto at = static_cast<std::size_t>(
      std::find_if(ready.begin(), ready.end(),
                   [&](const Candidate& c) { return priority(c) == extreme_; }) -
      ready.begin());
  if (kind_ == Kind::favour) return at < ready.size() ? at : scaled(draw, ready.size());
  if (at == ready.size() || ready.size() == 1) return scaled(draw, ready.size());
  const std::size_t other = scaled(draw, ready.size() - 1);
  return other + (other >= at ? 1 : 0);
}

std::size_t SchedulePolicy::first_by_priority(std::span<const Candidate> ready) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < ready.size(); ++i)
    if (priority(ready[i]) > priority(ready[best])) best = i;
  return best;
}

std::uint64_t& SchedulePolicy::priority(const Candidate& c) {
  const std::size_t at =
      static_cast<std::size_t>(c.rank) * kActors + static_cast<std::size_t>(c.actor);
  if (at >= priorities_.size())
    priorities_.resize((static_cast<std::size_t>(c.rank) + 1) * kActors);
  std::uint64_t& priority = priorities_[at];
  // The actor in the low bits keeps two equal draws apart.
  if (priority == 0)
    priority = kDrawn + (std::uint64_t{philox(seed_, at, kOfActors)[0]} << 32) + at;
  return priority;
}

void SchedulePolicy::plan_demotions() {
  const auto draw = philox(seed_, choices_, kOfSpans);
  for (std::size_t i = 0; i < demotions_.size(); ++i)
    demotions_[i] = choices_ + scaled(draw[i], choices_);
}

}  // namespace tessera::schedules
