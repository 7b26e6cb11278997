// Dropout whose mask is computed, never stored: the same for any number of ranks, each of which
// sets autograd::random_state().first_row, and again in a recomputation. Source: Srivastava et al.,
// "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.
#pragma once

#include "tessera/nn/module.hpp"

namespace tessera::nn {

class Dropout : public Module {
 public:
  // Requires: 0 <= p < 1, for a layer that drops all learns nothing.
  explicit Dropout(double p);

  // In training each element is kept with probability 1 - p and scaled by 1 / (1 - p); in
  // evaluation, and for p = 0, x itself. Every call in training takes the next draw of
  // autograd::random_state(): the mask depends on its seed, on the number of the draw, and on the
  // element's index within the global batch, which starts at row `first_row` of dimension 0
  // (exactly so where a row has a multiple of 4 elements).
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // Whether a call may give anything but x itself: it drops, or has hooks.
  bool drops() const noexcept { return (p_ > 0 && is_training()) || is_hooked(); }

 private:
  double p_;
};

}  // namespace tessera::nn
