#include "tessera/nn/state.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/param/encoded_source.hpp"
#include "runtime/param/renamed_source.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

namespace {

// "up.weight_scale" f32 [n, 1] of "up.weight" e4m3 [n, m].
bool are_scales_of(const StateTarget& scales, const StateTarget& values) {
  if (values.dtype != e4m3 || values.spec.shape.ndim() < 2 ||
      !scales.names[0].ends_with(kRowScales) ||
      scales.names[0] != concat(values.names[0], kRowScales))
    return false;
  Shape shape = values.spec.shape;
  for (int d = 1; d < shape.ndim(); ++d) shape[d] = 1;
  return scales.dtype == f32 && scales.spec.shape == shape;
}

}  // namespace

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
    t->change = [p = parameter](const FillRows& f) { p.edit(f); };
  }
  for (StateTarget& scales : targets)
    scales.are_row_scales = std::ranges::any_of(
        targets, [&](const StateTarget& values) { return are_scales_of(scales, values); });
  for (const auto& [name, buffer] : module.named_buffers(Persistent::yes, Tied::every_name)) {
    const auto [t, is_new] = target(buffer.id(), name);
    if (!is_new) continue;
    t->kind = "buffer";
    t->spec = {buffer.shape(), 1, 0};
    t->dtype = buffer.dtype();
    t->held = [b = buffer] { return b.value(); };
    t->change = [b = buffer](const FillRows& f) { b.replace(f); };
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
  const std::shared_ptr<const StateSource> here(std::shared_ptr<void>(), &source);  // not owned
  return StateMatching(targets, *encoded(renamed(here, options), targets, holder), holder, options)
      .report;
}

}  // namespace tessera::nn
