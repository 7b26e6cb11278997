// Where the draws of a step that is captured begin: its replays take others.
#pragma once

#include "tessera/autograd/random.hpp"

namespace tessera::autograd {

// In its scope draws on this thread are those of a captured step that began at `begin`.
class StepDraws {
 public:
  explicit StepDraws(const RandomState& begin) noexcept;
  ~StepDraws();
  StepDraws(const StepDraws&) = delete;
  StepDraws& operator=(const StepDraws&) = delete;
};

}  // namespace tessera::autograd
