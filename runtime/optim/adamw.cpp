#include "tessera/optim/adamw.hpp"

#include <cmath>

#include "runtime/optim/launch.hpp"

namespace tessera::optim {

AdamW::AdamW(std::vector<Parameter> parameters, const AdamWOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.weight_decay, 2), options_(options) {
  TESSERA_EXPECT(options.lr >= 0 && options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 &&
                     options.beta2 < 1 && options.eps >= 0 && options.weight_decay >= 0,
                 "AdamW: lr ", options.lr, ", betas ", options.beta1, " and ", options.beta2,
                 ", eps ", options.eps, ", weight_decay ", options.weight_decay,
                 "; none may be negative, betas are less than 1");
}

void AdamW::write_scalars(const Tensor& scalars, std::int64_t step) const {
  const auto t = static_cast<double>(step);
  kernels::OptimScalars s{};
  s.lr = static_cast<float>(lr());
  s.beta1 = static_cast<float>(options_.beta1);
  s.beta2 = static_cast<float>(options_.beta2);
  s.eps = static_cast<float>(options_.eps);
  // Of the betas that the kernel uses: it computes 1 - beta in f32, which for beta2 = 0.999 is 1e-5
  // away from the exact difference, and the two cancel.
  s.bias_correction1 = static_cast<float>(1 - std::pow(static_cast<double>(s.beta1), t));
  s.bias_correction2 = static_cast<float>(1 - std::pow(static_cast<double>(s.beta2), t));
  s.grad_scale = 1;
  detail::put_scalars(scalars, s);
}

void AdamW::update(const GroupState& state, const Tensor& scalars) const {
  const FlatGroup& group = *state.group;
  auto args = detail::common_args<kernels::AdamWArgs>(state, scalars);
  args.m = reinterpret_cast<float*>(state.moments[0].data());
  args.v = reinterpret_cast<float*>(state.moments[1].data());
  tessera::detail::launch(
      "adamw", group.device, tessera::detail::table(group.device).adamw, args,
      {tessera::detail::reads(group.gradient), tessera::detail::reads(state.segments),
       tessera::detail::reads(scalars), tessera::detail::updates(group.values),
       tessera::detail::updates(state.moments[0]), tessera::detail::updates(state.moments[1])});
}

}  // namespace tessera::optim
