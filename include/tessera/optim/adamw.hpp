// AdamW: Adam with decoupled weight decay, by PyTorch's formula. It has two moments, m and v. The
// defaults are those of language models: beta2 0.95 and weight_decay 0.1. PyTorch's are 0.999 and
// 0.01.
//
//   m = beta1 m + (1 - beta1) g    v = beta2 v + (1 - beta2) g^2              t: steps so far
//   p = p (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019. There is one t
// for all parameters. So a parameter that was skipped for want of a gradient counts the skipped
// steps, too.
#pragma once

#include <cmath>

#include "tessera/base/error.hpp"
#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // set_weight_decay changes it for some parameters
};

// The scalars that an update reads at `step`, counted from 1. Weight decay is not among them, since
// each parameter has its own.
inline kernels::UpdateScalars adamw_scalars(const AdamWOptions& options, double lr,
                                            std::int64_t step) {
  const auto t = static_cast<double>(step);
  kernels::UpdateScalars s{};
  s.lr = static_cast<float>(lr);
  s.beta1 = static_cast<float>(options.beta1);
  s.beta2 = static_cast<float>(options.beta2);
  s.eps = static_cast<float>(options.eps);
  // From the betas in f32, as the kernel uses them. It computes 1 - beta in f32, which for beta2 =
  // 0.999 is 1e-5 away from the exact difference. Here the same error cancels it.
  s.bias_correction1 = static_cast<float>(1 - std::pow(static_cast<double>(s.beta1), t));
  s.bias_correction2 = static_cast<float>(1 - std::pow(static_cast<double>(s.beta2), t));
  s.grad_scale = 1;
  return s;
}

// Throws: ContractError naming `what` for a value out of range.
inline void expect_valid(const char* what, const AdamWOptions& options) {
  TESSERA_EXPECT(options.lr >= 0 && options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 &&
                     options.beta2 < 1 && options.eps >= 0 && std::isfinite(options.eps) &&
                     options.weight_decay >= 0,
                 what, ": lr ", options.lr, ", betas ", options.beta1, " and ", options.beta2,
                 ", eps ", options.eps, ", weight_decay ", options.weight_decay,
                 "; none may be negative or infinite, betas are less than 1");
}

class AdamW final : public Optimizer {
 public:
  // Throws: ContractError for a value out of range.
  explicit AdamW(const std::vector<Parameter>& parameters, const AdamWOptions& options = {})
      : Optimizer(parameters, options.lr, options.weight_decay,
                  {.moments = 2, .names = {"exp_avg", "exp_avg_sq"}}),
        options_(options) {
    expect_valid("AdamW", options);
  }

 private:
  void write_scalars(const Tensor& scalars, std::int64_t step) const override {
    put_scalars(scalars, adamw_scalars(options_, lr(), step));
  }
  void update(const GroupState& state, const Tensor& scalars) const override {
    launch_update(kernels::UpdateOp::adamw, state, scalars);
  }

  AdamWOptions options_;  // without lr, which changes: see lr()
};

}  // namespace tessera::optim
