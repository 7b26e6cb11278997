// Where the gradients of parameters are written: the sinks of a flat group's trainable entries.
//
//   matrix product of backward ──▶ Leaf::sink ──▶ GradientSinks::sink(i)
//                                                   ├─ one rank:   FlatGroup::gradient itself
//                                                   └─ several:    the unit's gradient buffer
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/param/flat_group.hpp"
#include "tessera/autograd/node.hpp"

namespace tessera {

class GradientSinks {
 public:
  virtual ~GradientSinks() = default;
  // The sink of one more contribution to the gradient of the group's i-th trainable entry.
  virtual autograd::GradientSink sink(int i) = 0;
  // In a backward pass, after its last contribution.
  virtual void on_last_contribution(int i) { (void)i; }
  // Drops what backward has kept of that gradient; see FlatGroup::unreduced.
  virtual void drop_unreduced(int i) { (void)i; }
};

// A set of a group's entries, 64 to a word, as kernels::CompleteArgs takes it: those whose gradient
// has arrived.
class ArrivalMask {
 public:
  explicit ArrivalMask(std::size_t entries) : words_((entries + 63) / 64) {}

  bool has(std::size_t entry) const { return (words_[entry / 64] >> (entry % 64) & 1) != 0; }
  // Whether the entry was there before.
  bool add(std::size_t entry) {
    const bool before = has(entry);
    words_[entry / 64] |= std::uint64_t{1} << (entry % 64);
    return before;
  }
  bool empty() const {
    return std::all_of(words_.begin(), words_.end(), [](std::uint64_t word) { return word == 0; });
  }
  void clear() { std::fill(words_.begin(), words_.end(), 0); }
  void fill() { std::fill(words_.begin(), words_.end(), ~std::uint64_t{0}); }

  std::size_t words() const noexcept { return words_.size(); }
  std::uint64_t word(std::size_t i) const { return words_[i]; }
  // The word, which is empty afterwards.
  std::uint64_t take_word(std::size_t i) { return std::exchange(words_[i], 0); }

 private:
  std::vector<std::uint64_t> words_;
};

// The gradient of a group that no peer shares: contributions go straight into FlatGroup::gradient.
// At the end of a pass whoever asked for sinks calls `complete`, or `abandon` where it has failed.
class LocalGradient {
 public:
  explicit LocalGradient(std::shared_ptr<FlatGroup> group) : group_(std::move(group)) { lay_out(); }
  // As GradientSinks::sink. `scale`: what contributions are multiplied by where they are written.
  autograd::GradientSink sink(int i, double scale = 1);
  // Completes what arrived since the last call: missing gradients of a fresh array become zeros,
  // counts are written.
  void complete();
  // Drops the gradient if the pass had begun to write it.
  void abandon() noexcept;

 private:
  bool is_laid_out() const;
  void lay_out();

  std::shared_ptr<FlatGroup> group_;
  std::uint64_t layouts_ = 0;     // of the group, as these are,
  std::uint64_t recoveries_ = 0;  // and of its device
  Tensor padding_;                // table of kernels::FlatSpan
  ArrivalMask arrived_{0};        // since the last completion
  ArrivalMask held_{0};  // with a value in the gradient as it is, so that a sink adds to it
  bool fresh_ = false;
};

}  // namespace tessera
