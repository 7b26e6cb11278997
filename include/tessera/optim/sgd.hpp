// Stochastic gradient descent with momentum and weight decay, as PyTorch defines it. Moments: the
// momentum buffer, if any.
//
//   g' = g + weight_decay p    b = momentum b + g'    p = p - lr b
#pragma once

#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0;  // 0: no buffer
  double weight_decay = 0;
};

class Sgd final : public Optimizer {
 public:
  // Throws: ContractError for a value out of range.
  explicit Sgd(std::vector<Parameter> parameters, const SgdOptions& options = {});

 private:
  void write_scalars(const Tensor& scalars, std::int64_t step) const override;
  void update(const GroupState& state, const Tensor& scalars) const override;

  SgdOptions options_;  // but lr, which changes
};

}  // namespace tessera::optim
