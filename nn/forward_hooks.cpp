#include "tessera/nn/forward_hooks.hpp"

#include "tessera/autograd/elementwise.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

std::vector<ForwardHooks::Hook> ForwardHooks::living() {
  std::erase_if(hooks_, [](const Hook& hook) { return !*hook.is_alive; });
  return hooks_;
}
void ForwardHooks::run_before(const std::vector<Hook>& hooks, Module& module,
                              const CallTensors& in) {
  for (const Hook& hook : hooks)
    if (hook.before && *hook.is_alive) hook.before(module, in);
}
void ForwardHooks::run_after(const std::vector<Hook>& hooks, Module& module, const CallTensors& in,
                             const CallTensors& out) {
  for (const Hook& hook : hooks)
    if (hook.after && *hook.is_alive) hook.after(module, in, out);
}

bool are_others(const CallTensors& tensors, DType dtype) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (const Tensor& t = tensors[i]; t.defined() && is_floating(t.dtype()) && t.dtype() != dtype)
      return true;
  return false;
}

void cast_tensors(const CallTensors& tensors, DType dtype) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (Tensor& t = tensors[i]; t.defined() && is_floating(t.dtype()) && t.dtype() != dtype)
      t = cast(t, dtype);
}

}  // namespace tessera::nn
