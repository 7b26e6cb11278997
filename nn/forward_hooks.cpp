#include "tessera/nn/forward_hooks.hpp"

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

}  // namespace tessera::nn
