// The gradients of some parameters, flat group by flat group: what optimizers, clipping and loss
// scaling work on.
#pragma once

#include <memory>
#include <vector>

#include "runtime/param/flat_group.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera {

// Those of one group.
struct GroupPart {
  struct Stretch {
    std::size_t first, end;  // trainable entries that follow one another
  };
  std::shared_ptr<FlatGroup> group;
  std::vector<Stretch> stretches;

  bool is_whole() const;
  // Throws: ContractError naming `function` where backward has kept one unreduced.
  void expect_reduced(const char* function) const;
  // Of a gradient that is there, for work on the compute stream: flat, with the gaps behind the
  // entries, which are 0; and their arrival counts.
  Tensor gradient(const Stretch& stretch) const;
  Tensor counts(const Stretch& stretch) const;
  // Drops it, and what backward has kept unreduced of these: none is there until the next backward.
  // Where the group has others too, they are kept, and zeros with an arrival count of 0 lie where
  // these were.
  void drop_gradient() const;
};

// The parts of the distinct groups of `parameters`, in order of first mention.
// Throws: ContractError when one is not materialized.
std::vector<GroupPart> parts_of(const std::vector<Parameter>& parameters);

}  // namespace tessera
