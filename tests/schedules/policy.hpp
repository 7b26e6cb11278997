// How a shuffled schedule chooses, as a function of its seed. The scheduler asks at every choice;
// nothing here knows about threads or operations.
//
// Note [A mix of schedules]
// Even choices are a weak explorer: no stream ever stays behind for long. Half of the seeds follow
// priorities and demote the first once (d = 2), a fifth do it twice (d = 3), and a tenth each
// chooses evenly, starves one actor, or always takes one first. With n actors and k choices,
// priorities with d - 1 demotions meet a fault that d events must coincide for with a probability
// of at least 1 / (n k^(d-1)). That bound wants demotions spread evenly over the whole run, whose
// length nobody knows; so they are drawn anew for every span [2^i, 2^(i+1)) of choices. Source:
// Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS
// 2010.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera::schedules {

// Something that can go on: actor 0 is the host of `rank`, actor 1 + s the head of its stream s.
struct Candidate {
  int rank = 0;
  int actor = 0;
};

class SchedulePolicy {
 public:
  enum class Kind : std::uint8_t { even, demote_once, demote_twice, starve, favour };

  explicit SchedulePolicy(std::uint64_t seed);

  Kind kind() const noexcept { return kind_; }
  // The index of the next one.  Requires: `ready` is not empty. Same seed and same questions, same
  // answers.
  std::size_t choose(std::span<const Candidate> ready);

 private:
  std::size_t first_by_priority(std::span<const Candidate> ready);
  std::uint64_t& priority(const Candidate& c);
  void plan_demotions();

  std::uint64_t seed_;
  Kind kind_;
  std::uint64_t choices_ = 0;
  std::vector<std::uint64_t> priorities_;     // by rank and actor; 0 is not drawn yet
  std::uint64_t lowest_;                      // the next demoted one comes behind all others
  std::array<std::uint64_t, 2> demotions_{};  // of this span
  std::uint64_t extreme_ = 0;  // the highest priority met: who is starved or favoured
};

}  // namespace tessera::schedules
