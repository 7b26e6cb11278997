// Where the gradients of parameters are written: the sinks of a flat group's entries.
//
//   matrix product of backward ──▶ Leaf::sink ──▶ GradientSinks::sink(entry)
//                                                   ├─ one rank:   FlatGroup::gradient itself
//                                                   └─ several:    the unit's gradient buffer
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/param/flat_group.hpp"

namespace tessera {

// Where the gradients of a group's parameters are written during backward: the gradient buffer of a
// unit, or the group's own gradient.
class GradientSinks {
 public:
  virtual ~GradientSinks() = default;
  // The sink of one more contribution to the gradient of the group's entry.
  virtual autograd::GradientSink sink(int entry) = 0;
};

// The sinks of a group that no peer shares: gradients go straight into FlatGroup::gradient.
class LocalGradient final : public GradientSinks {
 public:
  explicit LocalGradient(FlatGroup& group);
  autograd::GradientSink sink(int entry) override;
  // Completes what arrived since the last call: missing gradients of a fresh array become zeros,
  // counts are written.
  void complete();
  // After a pass that ended with an exception: drops the gradient if the pass had begun to write
  // it.
  void abandon() noexcept;
  // When set, `complete` and `abandon` are left to the caller; otherwise one of them runs at the
  // end of each backward pass.
  bool completed_by_caller = false;

 private:
  FlatGroup& group_;
  Tensor padding_;  // table of kernels::PlaceEntry
  std::vector<std::uint64_t> arrived_;
  std::vector<bool> held_;  // entries that hold a value in the current array
  bool fresh_ = false;
  bool scheduled_ = false;
};

}  // namespace tessera
