// What the ranks of a world share whose schedule follows from a seed.
#pragma once

#include <cstdint>
#include <memory>

namespace tessera {

// The scheduler that all ranks of a `shuffled` world share: exactly one host thread or operation
// runs at a time, and the seed chooses the next at every point where a host thread blocks. Same
// program and seed, same trace.
class ShuffledScheduler {
 public:
  static std::shared_ptr<ShuffledScheduler> make(std::uint64_t seed, int ranks);
  virtual ~ShuffledScheduler() = default;

  // A rank's host thread brackets its life with these; `attach` sleeps until the seed chooses it.
  virtual void attach(int rank) = 0;
  virtual void detach(int rank) = 0;
};

}  // namespace tessera
