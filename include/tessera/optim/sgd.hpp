// Stochastic gradient descent with momentum, dampening and weight decay, as PyTorch defines it. Its
// one moment is the momentum buffer, if momentum is above 0.
//
//   g' = g + weight_decay p    b = momentum b + (1 - dampening) g'    p = p - lr b
//
// With Nesterov's momentum the last is p = p - lr (g' + momentum b). As in PyTorch the first step
// takes b = g' whole. The steps that count are the optimizer's: PyTorch counts those of each
// parameter, so dampening differs for one that is added, or has its first gradient, later.
#pragma once

#include "tessera/base/error.hpp"
#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

struct SGDOptions {
  double lr = 1e-2;
  double momentum = 0;   // 0: no buffer
  double dampening = 0;  // of a gradient on its way into the buffer
  double weight_decay = 0;
  bool nesterov = false;  // asks for momentum without dampening
};

class SGD final : public Optimizer {
 public:
  // Throws: ContractError for a value out of range.
  explicit SGD(const std::vector<Parameter>& parameters, const SGDOptions& options = {})
      : Optimizer(parameters, options.lr, options.weight_decay,
                  {.moments = options.momentum > 0 ? 1 : 0, .names = {"momentum_buffer"}}),
        options_(options) {
    TESSERA_EXPECT(options.lr >= 0 && options.momentum >= 0 && options.momentum < 1 &&
                       options.weight_decay >= 0,
                   "SGD: lr ", options.lr, ", momentum ", options.momentum, ", weight_decay ",
                   options.weight_decay, "; none may be negative, momentum is less than 1");
    TESSERA_EXPECT(options.dampening >= 0 && options.dampening <= 1, "SGD: dampening is ",
                   options.dampening, ", expected 0 to 1");
    TESSERA_EXPECT(options.momentum > 0 || options.dampening == 0, "SGD: dampening ",
                   options.dampening,
                   " has no meaning without momentum; set momentum, or leave it "
                   "out");
    TESSERA_EXPECT(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
                   "SGD: nesterov with momentum ", options.momentum, " and dampening ",
                   options.dampening, "; it needs momentum above 0 and no dampening");
  }

 private:
  void write_scalars(const Tensor& scalars, std::int64_t step) const override {
    kernels::UpdateScalars s{};
    s.lr = static_cast<float>(lr());
    s.momentum = static_cast<float>(options_.momentum);
    s.dampening = step == 1 ? 0 : static_cast<float>(options_.dampening);
    s.nesterov = options_.nesterov ? 1 : 0;
    s.grad_scale = 1;
    put_scalars(scalars, s);
  }
  void update(const GroupState& state, const Tensor& scalars) const override {
    launch_update(kernels::UpdateOp::sgd, state, scalars);
  }

  SGDOptions options_;  // without lr, which changes: see lr()
};

// The former names; the next version drops them.
using Sgd [[deprecated("use SGD")]] = SGD;
using SgdOptions [[deprecated("use SGDOptions")]] = SGDOptions;

}  // namespace tessera::optim
