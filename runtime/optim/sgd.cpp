#include "tessera/optim/sgd.hpp"

#include "runtime/optim/launch.hpp"

namespace tessera::optim {

Sgd::Sgd(std::vector<Parameter> parameters, const SgdOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.weight_decay,
                options.momentum > 0 ? 1 : 0),
      options_(options) {
  TESSERA_EXPECT(
      options.lr >= 0 && options.momentum >= 0 && options.momentum < 1 && options.weight_decay >= 0,
      "Sgd: lr ", options.lr, ", momentum ", options.momentum, ", weight_decay ",
      options.weight_decay, "; none may be negative, momentum is less than 1");
}

void Sgd::write_scalars(const Tensor& scalars, std::int64_t) const {
  kernels::OptimScalars s{};
  s.lr = static_cast<float>(lr());
  s.momentum = static_cast<float>(options_.momentum);
  s.grad_scale = 1;
  detail::put_scalars(scalars, s);
}

void Sgd::update(const GroupState& state, const Tensor& scalars) const {
  const FlatGroup& group = *state.group;
  const Tensor buffer = state.moments.empty() ? Tensor() : state.moments[0];
  auto args = detail::common_args<kernels::SgdArgs>(state, scalars);
  if (buffer.defined()) args.buffer = reinterpret_cast<float*>(buffer.data());
  tessera::detail::launch(
      "sgd", group.device, tessera::detail::table(group.device).sgd, args,
      {tessera::detail::reads(group.gradient), tessera::detail::reads(state.segments),
       tessera::detail::reads(scalars), tessera::detail::updates(group.values),
       tessera::detail::updates(buffer)});
}

}  // namespace tessera::optim
