#include "tessera/nn/state.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/nn/module.hpp"

namespace tessera::nn {

std::vector<StateTarget> state_targets(const Module& module) {
  std::vector<StateTarget> targets;
  std::map<const void*, std::size_t> known;
  // The target that `state` is, and whether it is met for the first time.
  const auto target = [&](const void* state, const std::string& name) {
    const auto [at, is_new] = known.try_emplace(state, targets.size());
    if (is_new) targets.emplace_back();
    StateTarget& found = targets[at->second];
    found.names.push_back(name);
    return std::pair<StateTarget*, bool>(&found, is_new);
  };
  for (const auto& [name, parameter] : module.named_parameters(Tied::every_name)) {
    const auto [t, is_new] = target(parameter.id(), name);
    if (!is_new) continue;
    t->spec = parameter.spec();
    t->dtype = parameter.dtype();
    if (!parameter.row_parts().empty()) t->parts_in_files = named_row_parts(name, parameter);
    t->is_transposed_in_files = module.saves_transposed(name);
    t->held = [p = parameter] { return p.shard(); };
    t->assign = [p = parameter](const Tensor& rows) { p.assign(rows); };
  }
  for (const auto& [name, buffer] : module.named_buffers(Persistent::yes, Tied::every_name)) {
    const auto [t, is_new] = target(buffer.id(), name);
    if (!is_new) continue;
    t->kind = "buffer";
    t->spec = {buffer.shape(), 1, 0};
    t->dtype = buffer.dtype();
    t->held = [b = buffer] { return b.value(); };
    t->assign = [b = buffer](const Tensor& values) { b.assign(values); };
  }
  return targets;
}

StateHolder state_holder(const Module& module) {
  return {.optional_prefix = module.optional_prefix(),
          .is_left_in_files = [&module](std::string_view name) {
            return module.is_left_in_files(name);
          }};
}

LoadReport check_load(const Module& model, const StateSource& source, const LoadOptions& options) {
  const auto targets = state_targets(model);
  const StateHolder holder = state_holder(model);
  return StateMatching(targets, source, holder, options).report;
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

// --- by name ---

namespace {

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

Parameter Module::get_parameter(std::string_view name) const {
  return find_named("get_parameter", named_parameters(Tied::every_name), name);
}

Module& Module::get_submodule(std::string_view name) {
  return *find_named("get_submodule", named_modules(), name);
}

void Module::set_trainable(bool trainable) {
  for (const Parameter& p : parameters()) p.set_trainable(trainable);
}

}  // namespace tessera::nn
