// Dropout whose mask is computed, never stored. The mask is the same for any number of ranks,
// independent between ranks, and the same again in a recomputation. Source: Srivastava et al.,
// "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.
#pragma once

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

class Dropout : public Module {
 public:
  // Requires: 0 <= p < 1, since a layer that drops all learns nothing. Throws: ContractError
  // otherwise.
  explicit Dropout(double p) : p_(p) {
    TESSERA_EXPECT(p >= 0 && p < 1, "Dropout: p is ", p, ", expected at least 0 and less than 1");
  }

  // In training each element is kept with probability 1 - p and scaled by 1 / (1 - p). In
  // evaluation, and for p = 0, the result is x itself.
  //   A call in training takes the next draw of autograd::random_state(). The mask depends on its
  // seed, on the number of the draw, and on the element's index within the global batch. Each rank
  // is taken to have as many rows as this x; `first_row` says otherwise. If a rank's rows are no
  // multiple of 4 elements, its mask is independent of the others', but differs from that of one
  // whole batch.
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    const auto forward = [&](const Tensor& in) {
      if (p_ == 0 || !is_training()) return in;
      return dropout(in, p_, autograd::next_dropout_key(in.device()), autograd::dropout_offset(in));
    };
    return call(forward, x);
  }
  // Whether a call may return anything but x itself: it drops, or has hooks.
  bool drops() const noexcept { return (p_ > 0 && is_training()) || is_hooked(); }

 private:
  double p_;
};

}  // namespace tessera::nn
