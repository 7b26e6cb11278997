// Which random numbers the operations of this thread draw next: dropout's seed and its position in
// the sequence.
//
// A draw depends on (seed, number of the draw, global index) only, so a mask is the same for any
// number of ranks that have equal parts of one batch, and independent between them. What runs an
// operation twice and needs the same draws, as recomputation does, keeps a copy of the state and
// puts it back.
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
  // every rank's part has as many rows as the call, and lies behind those of lower ranks. Set it
  // where parts are unequal, or where micro-batches are to draw what one batch draws.
  std::optional<std::int64_t> first_row{};
};

// This thread's state, to be read and set.
RandomState& random_state() noexcept;

// What decides a mask of dropout: a number, or for a captured step one on the device, which the
// host gives each replay anew.
struct DropoutKey {
  DropoutKey(std::uint64_t key) : number(key) {}  // NOLINT(google-explicit-constructor)
  std::uint64_t number;
  const std::uint64_t* on_device = nullptr;
};
// That of this thread's next draw, for operations on `device`.
// Throws: ContractError in a step that is captured and has set the seed itself.
DropoutKey next_dropout_key(const Device& device);

// The `offset` with which `dropout` masks x, this rank's part of a batch. Where first_row is set,
// it is that of its row, rounded down to a counter of 4 elements. Else it lies behind what the
// lower ranks of the device's world take. Both are the same where a part has a multiple of 4
// elements.
std::int64_t dropout_offset(const Tensor& x);

// Runs its scope from `state` and puts back what was there before.
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
