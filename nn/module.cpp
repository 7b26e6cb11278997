#include "tessera/nn/module.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "runtime/param/group_part.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/device/captured_work.hpp"

namespace tessera::nn {

namespace {

std::atomic<std::uint64_t> registered{0};

bool has(const std::vector<std::pair<std::string, Parameter>>& parameters, const Parameter& p) {
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const auto& own) { return own.second == p; });
}

// What a module has in the place of a name that it does not have: at most a few.
template <class Named>
std::string names_of(const Named& named) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(named.size(), kShown); ++i)
    text += concat(i > 0 ? ", '" : "'", named[i].first, '\'');
  return named.size() > kShown ? concat(text, " and ", named.size() - kShown, " more") : text;
}

template <class Named>
auto& find_named(const char* function, const Named& named, std::string_view name) {
  const auto found =
      std::find_if(named.begin(), named.end(), [&](const auto& n) { return n.first == name; });
  TESSERA_EXPECT(found != named.end(), function, ": there is no '", name, "'; there are ",
                 names_of(named));
  return found->second;
}

}  // namespace

// It has no say any more in how its parameters are used. Each module counts once.
Module::~Module() {
  for (const Parameter& p : streamed_) p.remove_streaming(*this);
  while (!parameters_.empty()) {
    const Parameter p = std::move(parameters_.back().second);
    parameters_.pop_back();
    p.count_name(-1);
    if (!has(parameters_, p)) p.count_module(-1);
  }
}

void Module::register_parameter(std::string_view name, const Parameter& parameter) {
  if (!parameter.defined()) return;
  expect_free("register_parameter", name);
  if (!has(parameters_, parameter)) parameter.count_module(1);
  parameters_.emplace_back(name, parameter);
  if (parameter.name().empty()) parameter.set_name(std::string(name));  // until a root names it
  parameter.count_name(1);
  ++registered;
}

std::uint64_t Module::registrations() noexcept {
  return registered.load(std::memory_order_relaxed);
}

void Module::stream_parameter(const Parameter& parameter) {
  TESSERA_EXPECT(has(parameters_, parameter),
                 "stream_parameter: the parameter is not registered here; call register_parameter "
                 "on this module first");
  TESSERA_EXPECT(parameter.shape().ndim() > 0, "stream_parameter: the parameter is of shape ",
                 parameter.shape(), "; expected rows, which slices are made of");
  if (std::find(streamed_.begin(), streamed_.end(), parameter) != streamed_.end()) return;
  TESSERA_EXPECT(!parameter.unit(), "stream_parameter: parameter '", parameter.name(),
                 "' belongs to unit '", *parameter.unit(), "' already; call it before fully_shard");
  streamed_.push_back(parameter);
  parameter.add_streaming(*this);
}

void Module::register_module(std::string_view name, Module& module) {
  expect_free("register_module", name);
  modules_.emplace_back(name, &module);
  ++registered;
}

void Module::expect_free(const char* function, std::string_view name) const {
  TESSERA_EXPECT(name.find('.') == std::string_view::npos && !name.empty(), function, ": '", name,
                 "' is not a name; use one word without a dot");
  const auto is_taken = [&](const auto& own) { return std::get<0>(own) == name; };
  TESSERA_EXPECT(std::none_of(parameters_.begin(), parameters_.end(), is_taken) &&
                     std::none_of(modules_.begin(), modules_.end(), is_taken) &&
                     std::none_of(buffers_.begin(), buffers_.end(),
                                  [&](const OwnBuffer& own) { return own.name == name; }),
                 function, ": '", name, "' is taken; choose another name");
}

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> found;
  std::unordered_set<const Module*> known;
  const std::function<void(const std::string&, Module&)> visit = [&](const std::string& name,
                                                                     Module& module) {
    if (!known.insert(&module).second) return;
    found.emplace_back(name, &module);
    for (const auto& [child, m] : module.modules_)
      visit(name.empty() ? child : name + '.' + child, *m);
  };
  visit("", *this);
  return found;
}

std::vector<std::pair<std::string, Parameter>> Module::named_parameters(Tied tied) const {
  std::vector<std::pair<std::string, Parameter>> found;
  std::unordered_set<const void*> known;  // of those that it may meet again
  for (const auto& [path, module] : const_cast<Module*>(this)->named_modules()) {
    for (const Parameter& p : module->streamed_) p.name_streaming(*module, path);
    for (const auto& [name, parameter] : module->parameters_) {
      const bool is_new = !parameter.is_tied() || known.insert(parameter.id()).second;
      if (!is_new && tied == Tied::once) continue;
      found.emplace_back(path.empty() ? name : path + '.' + name, parameter);
      if (is_new && parameter.name().size() < found.back().first.size())
        parameter.set_name(found.back().first);
    }
  }
  return found;
}

bool Module::saves_transposed(std::string_view) const { return false; }

std::vector<Parameter> Module::parameters() const {
  std::vector<Parameter> out;
  std::unordered_set<const void*> known;  // of those that it may meet again
  for (const auto& [path, module] : const_cast<Module*>(this)->named_modules())
    for (const auto& [name, parameter] : module->parameters_)
      if (!parameter.is_tied() || known.insert(parameter.id()).second) out.push_back(parameter);
  return out;
}

std::int64_t Module::numel() const {
  std::int64_t n = 0;
  for (const Parameter& p : parameters()) n = checked_add(n, p.shape().numel());
  return n;
}

void Module::materialize(const Device& device) {
  TESSERA_EXPECT(!device.is_meta(),
                 "materialize: the device meta has no memory; give a real device");
  std::vector<Parameter> loose;
  for (const auto& [name, parameter] : named_parameters())
    if (parameter.device().is_meta() && !parameter.unit()) loose.push_back(parameter);
  std::unordered_set<const ModuleHook*> known;  // several modules may have one
  for (const auto& [name, module] : named_modules())
    if (module->hook_ && known.insert(module->hook_.get()).second)
      module->hook_->materialize(device);
  if (!loose.empty()) materialize_whole("model", loose, device);
  for (const auto& [name, buffer] : named_buffers()) buffer.materialize(device);
}

void Module::set_hook(std::shared_ptr<ModuleHook> hook) {
  TESSERA_EXPECT(!hook_ || !hook,
                 "this module has a hook already; fully_shard is applied once to a module");
  hook_ = std::move(hook);
  ++registered;
}

void Module::set_training(bool training) {
  if (training != std::exchange(training_, training))
    decisions().modes ^= fnv1a(reinterpret_cast<std::uintptr_t>(this), fnv1a("training"));
  for (const auto& [name, module] : modules_) module->set_training(training);
}

void Module::for_each_module(const std::function<void(Module&)>& f) {
  std::vector<const Module*> seen;
  const std::function<void(Module&)> below = [&](Module& module) {
    if (std::find(seen.begin(), seen.end(), &module) != seen.end()) return;
    seen.push_back(&module);
    for (const auto& [name, child] : module.modules_) below(*child);
    f(module);
  };
  below(*this);
}

void Module::register_buffer(std::string_view name, const Buffer& buffer, Persistent persistent) {
  TESSERA_EXPECT(buffer.defined(), "register_buffer: '", name, "' is undefined; give it a shape");
  expect_free("register_buffer", name);
  buffers_.push_back({std::string(name), buffer, persistent});
}

std::vector<std::pair<std::string, Buffer>> Module::named_buffers(Persistent least,
                                                                  Tied tied) const {
  std::vector<std::pair<std::string, Buffer>> found;
  for (const auto& [path, module] : const_cast<Module*>(this)->named_modules())
    for (const auto& [name, buffer, persistent] : module->buffers_) {
      if (persistent < least) continue;
      const bool known = std::any_of(found.begin(), found.end(),
                                     [&b = buffer](const auto& f) { return f.second == b; });
      if (known && tied == Tied::once) continue;
      found.emplace_back(path.empty() ? name : path + '.' + name, buffer);
      if (!known && buffer.name().size() < found.back().first.size())
        buffer.set_name(found.back().first);
    }
  return found;
}

Parameter Module::get_parameter(std::string_view name) const {
  return find_named("get_parameter", named_parameters(Tied::every_name), name);
}

Module& Module::get_submodule(std::string_view name) {
  return *find_named("get_submodule", named_modules(), name);
}

void Module::set_trainable(bool trainable) {
  for (const Parameter& p : parameters()) p.set_trainable(trainable);
}

void Module::zero_grad() {
  std::vector<Parameter> held;
  for (const Parameter& p : parameters())
    if (!p.device().is_meta()) held.push_back(p);
  for (const GroupPart& part : parts_of(held)) part.drop_gradient();
}

HookHandle Module::register_forward_pre_hook(ForwardPreHook hook) {
  if (!forward_hooks_) forward_hooks_ = std::make_unique<ForwardHooks>();
  return forward_hooks_->add(std::move(hook));
}
HookHandle Module::register_forward_hook(ForwardHook hook) {
  if (!forward_hooks_) forward_hooks_ = std::make_unique<ForwardHooks>();
  return forward_hooks_->add(std::move(hook));
}

}  // namespace tessera::nn
