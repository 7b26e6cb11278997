// Learning rates by step, as pure functions: warm-up, then constant, then decay. Source: torchtitan
// 0.2.2 (linear_warmup_stable_decay).
//
//   1             ┌──────────┐
//              ╱              ╲
//           ╱                   ╲ min_lr_factor
//           warm-up   stable   decay
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>

#include "tessera/base/error.hpp"

namespace tessera::optim {

enum class DecayType : std::uint8_t { constant, linear, sqrt, cosine };

struct Schedule {
  std::int64_t steps = 0;  // of the whole training
  std::int64_t warmup_steps = 0;
  // The part of all steps that decays, at their end, 0 to 1. Unset: all steps after the warm-up.
  std::optional<double> decay_ratio{};
  DecayType decay_type = DecayType::constant;
  double min_lr_factor = 0;  // that the decay ends at
};

// The factor on the base learning rate at `step`, counted from 0. The last step still has a rate
// above the minimum. Throws: ContractError for a negative number of steps, for a ratio outside [0,
// 1] and for a minimum that is negative or not finite.
inline double lr_factor(const Schedule& s, std::int64_t step) {
  TESSERA_EXPECT(s.steps >= 0 && s.warmup_steps >= 0 && step >= 0, "lr_factor: step ", step, " of ",
                 s.steps, " with ", s.warmup_steps, " steps of warm-up; none may be negative");
  TESSERA_EXPECT(!s.decay_ratio || (*s.decay_ratio >= 0 && *s.decay_ratio <= 1),
                 "lr_factor: decay_ratio is ", s.decay_ratio.value_or(0), ", expected 0 to 1");
  TESSERA_EXPECT(s.min_lr_factor >= 0 && std::isfinite(s.min_lr_factor),
                 "lr_factor: min_lr_factor is ", s.min_lr_factor,
                 ", expected a finite number of at least 0");
  const std::int64_t warmup = std::min(s.warmup_steps, s.steps);
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (s.decay_type == DecayType::constant) return 1;

  std::int64_t decay = s.steps - warmup;
  if (s.decay_ratio)  // half to even, as Python rounds
    decay = std::min(decay, static_cast<std::int64_t>(
                                std::nearbyint(static_cast<double>(s.steps) * *s.decay_ratio)));
  const std::int64_t decay_begin =
      s.steps + 1 - decay;  // one virtual step more, so that the last one is not at the minimum
  if (step < decay_begin || decay == 0) return 1;
  const double progress =
      std::min(1.0, static_cast<double>(step + 1 - decay_begin) / static_cast<double>(decay));
  double left = 1 - progress;
  if (s.decay_type == DecayType::sqrt) left = 1 - std::sqrt(progress);
  if (s.decay_type == DecayType::cosine) left = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return s.min_lr_factor + (1 - s.min_lr_factor) * left;
}

}  // namespace tessera::optim
