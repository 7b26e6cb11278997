// State of any shape that an optimizer declares, and updates that are made of tensor operations.
#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "runtime/param/flat_group.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/param/update_log.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// What stands behind a parameter's name in a state dict or a file.
bool is_free(std::string_view name, std::span<const char* const> moments) {
  constexpr std::string_view kOthers[] = {"lr_factor", "weight_decay", "step"};
  return !name.empty() && name.find('.') == name.npos && !std::ranges::count(kOthers, name) &&
         !std::ranges::count(moments, name);
}

ShardSpec spec_of(const StateShape& state, const Parameter& of, const ShardSpec& rows) {
  if (state.cut == StateShape::Cut::whole) return {state.shape, 1, 0};
  ShardSpec spec = rows;
  spec.shape = state.shape;
  TESSERA_EXPECT(spec.has_dim() && (state.shape.ndim() == 0) == (rows.shape.ndim() == 0) &&
                     spec.rows() == rows.rows(),
                 "states_of: state '", state.name, "' of ", state.shape, " is to be cut as '",
                 of.name(), "' of ", rows.shape, " is, along dimension ", rows.dim,
                 "; give it as many rows there, or Cut::whole");
  return spec;
}

}  // namespace

// The declared state of a group's parameters: what was there, where its shape and its rows are as
// they were, else zeros, with this rank's rows of what was whole. True: some is new.
bool Optimizer::take_states(const GroupState& state, const std::vector<Own*>& own,
                            const Before& before) const {
  bool has_new = false;
  for (Own* const one : own) {
    const Own& was = before.own[static_cast<std::size_t>(one - own_.data())];
    one->kept.clear();
    if (one->offset < 0) continue;
    for (const StateShape& declared : states_of(one->parameter)) {
      const auto is_it = [&](const auto& kept) { return kept.name == declared.name; };
      const Needs& needs = kinds_[one->kind].needs;
      const auto moments = std::span(needs.names).first(static_cast<std::size_t>(needs.moments));
      TESSERA_EXPECT(is_free(declared.name, moments) && std::ranges::none_of(one->kept, is_it),
                     "states_of: a state of '", one->parameter.name(), "' is named '",
                     declared.name, "'; give each a name of its own, without dots");
      Own::Kept& kept =
          one->kept.emplace_back(Own::Kept{.name = declared.name,
                                           .spec = spec_of(declared, one->parameter, one->spec),
                                           .values = {}});
      const auto held = std::ranges::find_if(was.kept, is_it);
      const bool is_there =
          held != was.kept.end() && was.offset >= 0 && held->spec.shape == declared.shape;
      if (is_there && held->spec == kept.spec && held->values.device() == state.group->device) {
        kept.values = held->values;
        continue;
      }
      has_new = true;
      const OwnerGuard owner(state.group->device, "moments");
      // As a parameter's rows lie: with the dimension that is cut outermost.
      const Shape local = kept.spec.local_shape();
      kept.values = Tensor::zeros({local.numel()}, f32, state.group->device)
                        .view(local, kept.spec.strides(local), 0);
      if (!is_there || local.numel() == 0) continue;
      if (held->spec.world == kept.spec.world)
        raw::copy_into(kept.values, held->values);
      else if (held->spec.world < kept.spec.world)
        raw::copy_into(kept.values, rows_of(held->values, kept.spec));
    }
  }
  return has_new;
}

Tensor Optimizer::state(const Parameter& of, std::string_view name) const {
  const Own& own = own_of("state", of);
  if (log_->prepared == 0 || own.offset < 0 || !own.parameter.trainable()) return {};
  const auto found = std::ranges::find(own.kept, name, &Own::Kept::name);
  TESSERA_EXPECT(found != own.kept.end(), "Optimizer::state: the optimizer keeps no '", name,
                 "' of parameter '", of.name(), "'; states_of says what it keeps");
  return found->values;
}

std::optional<Optimizer::Update> Optimizer::begin_update(const Own& of) {
  if (of.offset < 0 || !of.parameter.trainable()) return {};
  FlatGroup& group = *states_[of.state].group;
  const FlatEntry& entry = state_of(of.parameter)->flat_entry();
  if (!group.gradient.defined() || entry.trainable < 0) return {};  // thawed: it has none yet
  const Shape local = of.spec.local_shape();
  const Shape strides = of.spec.strides(local);
  const Tensor& gradient = group.await_gradient();
  is_written_.resize(states_.size());
  is_written_[of.state] = true;
  return Update{.values = group.values.view(local, strides, entry.offset),
                .gradient = gradient.view(local, strides, entry.gradient_offset),
                .arrivals = group.counts().view({}, {}, entry.trainable)};
}

}  // namespace tessera::optim
