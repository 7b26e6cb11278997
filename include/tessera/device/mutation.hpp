// One ordering edge of a program removed on purpose: the race checker must see that it is gone.
//
//   device.context().mutate({.kind = Mutation::Kind::forget_wait, .at = 7});
//
// Tests do this to every edge of the engine in turn. `at` counts from 1 in the order of the host
// program, only what has an effect: a wait that the clocks cover is no edge.
#pragma once

#include <cstdint>

namespace tessera {

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
  explicit Mutator(const Mutation& mutation) : mutation_(mutation) {}
  bool hits(Mutation::Kind kind) { return kind == mutation_.kind && ++seen_ == mutation_.at; }
  // Edges of the mutation's kind so far: with `at` = 0 nothing is removed and all are counted.
  std::uint64_t seen() const noexcept { return seen_; }

 private:
  Mutation mutation_;
  std::uint64_t seen_ = 0;
};

}  // namespace tessera
