// AdamW: Adam with decoupled weight decay, as PyTorch defines it. Moments: m, v.
//
//   m = beta1 m + (1 - beta1) g    v = beta2 v + (1 - beta2) g^2              t: steps so far
//   p = p (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019. One t for all
// parameters: a parameter that was skipped for want of a gradient is corrected as if it had been
// there.
#pragma once

#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of all parameters
};

class AdamW final : public Optimizer {
 public:
  // Throws: ContractError for a value out of range.
  explicit AdamW(std::vector<Parameter> parameters, const AdamWOptions& options = {});

 private:
  void write_scalars(const Tensor& scalars, std::int64_t step) const override;
  void update(const GroupState& state, const Tensor& scalars) const override;

  AdamWOptions options_;  // but lr, which changes
};

}  // namespace tessera::optim
