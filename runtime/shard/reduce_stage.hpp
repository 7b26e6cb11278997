// A stage of the reduction of a piece of gradients: what one option adds to it. A piece has the
// stages that its unit's options ask for, and none otherwise; the reduction itself knows no option.
//
//   │ zeros for what is missing, pack .. │ reduce-scatter │ pass, pass, .. │ add to the gradient │
//                                         into place(place(.. the gradient))
//
// To add one: derive from this in a file of the class's name, say where it stands among the others
// (Place), and put it where the option is known: GradientPiece's constructor, or a setter.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/memory/arena.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::shard {

// Sums of a piece over ranks, in a flat tensor: where values and arrival counts begin, in elements.
struct Sums {
  const Tensor* flat;
  std::int64_t values, counts;
};

// A piece on its way to the flat gradient.
struct Reduction {
  Sums gradient;                 // where its sums go
  Sums sums;                     // where they are, or where the stage before is to leave them
  Stream last;                   // on which the last of it is queued
  bool is_fresh;                 // the gradient has nothing there to which they are added,
  bool is_direct;                // and the last stage leaves them there
  std::optional<Event> reduced;  // where a stage has brought them there: when they are
};

class ReduceStage {
 public:
  // In this order the stages of a piece run.
  enum class Place : std::uint8_t { packed, replicas, hook, host, gradient };

  explicit ReduceStage(Place place) : place_(place) {}
  virtual ~ReduceStage() = default;
  ReduceStage(const ReduceStage&) = delete;
  ReduceStage& operator=(const ReduceStage&) = delete;
  Place place() const noexcept { return place_; }

  // Where the sums of all ranks come to be: the stream that writes the gradient, which is on the
  // device unless `is_elsewhere`.
  virtual Stream stream(Stream reduce) const { return reduce; }
  virtual bool is_elsewhere() const noexcept { return false; }
  // Whether the sums stay here for now, and nothing behind this stage runs.
  virtual bool postpones() const noexcept { return false; }

  // Memory for the flat gradient, which is not there yet. Undefined: that of the pool.
  virtual Tensor fresh_gradient() { return {}; }

  // --- in this order, each of them of all stages ---
  // On the stream of reductions: the piece is complete in its slot, and is scattered next.
  virtual void pack(const Slot&) {}
  // From the last stage to the first: gives the one before it another place for the sums.
  virtual void place(Reduction&) {}
  // Makes of the sums of the one before those of this one, where it was to leave them.
  virtual void pass(Reduction&) {}

  // Drops what is kept from pass to pass: all, or of an entry, its `chunk` values from `begin` on.
  virtual void drop() noexcept {}
  virtual void drop_entry(std::size_t /*entry*/, std::int64_t /*begin*/, std::int64_t /*chunk*/) {}

 private:
  const Place place_;
};

}  // namespace tessera::shard
