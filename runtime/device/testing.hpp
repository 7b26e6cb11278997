// What only tests ask of a device: to lose an ordering edge on purpose, and to start operations
// late.
#pragma once

#include <cstdint>

#include "tessera/device/device_context.hpp"

namespace tessera {

// One ordering edge of a program removed: the race checker must see that it is gone.
//
//   Mutator::install(device.context(), {.kind = Mutation::Kind::forget_wait, .at = 7});
//
// Tests do this to every edge of the engine in turn. `at` counts from 1 in the order of the host
// program, only what has an effect: a wait that the clocks cover is no edge.
struct Mutation {
  enum class Kind : std::uint8_t {
    none,
    forget_wait,   // the program leaves a wait out: clocks and executor never hear of it, so a gate
                   // that looks at the clocks can still heal it
    drop_wait,     // the executor loses a wait: the clocks believe in it, nothing can heal it
    early_record,  // a record of the program stands before its stream's last operation
    early_free,    // a free comes before the last operation, on the stream of an event that the
                   // free asks for
  };
  Kind kind = Kind::none;
  std::uint64_t at = 0;
};

// A mutation and how often its kind of edge has come.
class Mutator {
 public:
  // The device loses the edge from here on.
  static void install(DeviceContext& context, const Mutation& mutation) {
    context.mutator_ = std::make_unique<Mutator>(mutation);
  }
  // Edges of the mutation's kind so far: with `at` = 0 nothing is removed and all are counted.
  static std::uint64_t edges_seen(const DeviceContext& context) noexcept {
    return context.mutator_ ? context.mutator_->seen_ : 0;
  }

  explicit Mutator(const Mutation& mutation) : mutation_(mutation) {}
  bool hits(Mutation::Kind kind) { return kind == mutation_.kind && ++seen_ == mutation_.at; }

 private:
  Mutation mutation_;
  std::uint64_t seen_ = 0;
};

// From here on some operations of a GPU start late, as the seed has it: the device is kept busy
// before them and touches no memory. No bit of a result may change.
// Requires: the executor is `cuda`; called on the host thread of the device.
void delay_operations(DeviceContext& context, std::uint64_t seed);

}  // namespace tessera
