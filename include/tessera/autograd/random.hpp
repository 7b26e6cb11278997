// Which random numbers the operations of this thread draw next: the seed of dropout, and its
// position in the sequence.
//
// A draw depends on (seed, number of the draw, global index) only. So a mask is the same for any
// number of ranks that have equal parts of one batch, and independent between ranks. Recomputation
// runs an operation twice with the same draws: it keeps a copy of the state and puts it back.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/device/device.hpp"

namespace tessera {
class Tensor;
}

namespace tessera::autograd {

struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t draws = 0;  // calls so far; every rank makes the same ones
  // This rank's first sample within the global batch, where the index of dimension 0 starts. Unset:
  // every rank's part has as many rows as the call, and lies behind those of lower ranks. Set it if
  // parts are unequal, or if micro-batches should draw what one batch draws.
  std::optional<std::int64_t> first_row{};
};

// This thread's state; read it or set it.
RandomState& random_state() noexcept;

// The key of a mask of dropout: a number. A captured step has one on the device, which the host
// sets for each replay.
struct DropoutKey {
  DropoutKey(std::uint64_t key) : number(key) {}  // NOLINT(google-explicit-constructor)
  std::uint64_t number;
  const std::uint64_t* on_device = nullptr;
};
// The key of this thread's next draw, for operations on `device`.
// Throws: ContractError in a captured step that has set the seed itself.
DropoutKey next_dropout_key(const Device& device);

// The `offset` with which `dropout` masks x, this rank's part of a batch. If first_row is set, it
// is that row's offset, rounded down to a counter of 4 elements. Otherwise it lies behind what the
// lower ranks of the device's world take. Both are the same if a part has a multiple of 4 elements.
std::int64_t dropout_offset(const Tensor& x);

// Runs its scope from `state`, and then puts back the state from before.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(const RandomState& state) noexcept : before_(random_state()) {
    random_state() = state;
  }
  ~RandomStateGuard() { random_state() = before_; }
  RandomStateGuard(const RandomStateGuard&) = delete;
  RandomStateGuard& operator=(const RandomStateGuard&) = delete;

 private:
  RandomState before_;
};

}  // namespace tessera::autograd
