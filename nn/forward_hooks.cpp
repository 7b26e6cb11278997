#include "tessera/nn/forward_hooks.hpp"

#include "tessera/autograd/elementwise.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

HookHandle Module::register_forward_pre_hook(ForwardPreHook hook) {
  if (!forward_hooks_) forward_hooks_ = std::make_unique<ForwardHooks>();
  return forward_hooks_->add(std::move(hook));
}
HookHandle Module::register_forward_hook(ForwardHook hook) {
  if (!forward_hooks_) forward_hooks_ = std::make_unique<ForwardHooks>();
  return forward_hooks_->add(std::move(hook));
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
