// Where an optimizer's moments lie, and how it follows its parameters: to other groups when they
// are sharded, to another layout when they are frozen or thawed.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "runtime/param/group_part.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/param/update_log.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {

std::vector<Parameter> Optimizer::parameters() const {
  std::vector<Parameter> all;
  for (const Own& own : own_) all.push_back(own.parameter);
  return all;
}

const Optimizer::Own& Optimizer::own_of(const char* function, const Parameter& of) const {
  const auto found = own_of_.find(of.id());
  TESSERA_EXPECT(found != own_of_.end(), "Optimizer::", function, ": parameter '",
                 of.defined() ? of.name() : "", "' is not this optimizer's");
  return own_[found->second];
}

std::vector<Tensor> Optimizer::moments(const Parameter& of) const {
  const Own& own = own_of("moments", of);
  if (log_->prepared == 0 || own.offset < 0 || !own.parameter.trainable()) return {};
  const Shape local = own.spec.local_shape();
  std::vector<Tensor> rows;
  for (const Tensor& moment : states_[own.state].moments)
    rows.push_back(moment.view(local, own.spec.strides(local), own.offset));
  return rows;
}

std::shared_ptr<const std::vector<GroupPart>> Optimizer::parts() const {
  return is_current() ? parts_ : std::make_shared<std::vector<GroupPart>>(parts_of(parameters()));
}

bool Optimizer::is_current() const {
  return log_->prepared > 0 && log_->tables > 0 && !rates_changed_ &&
         std::all_of(states_.begin(), states_.end(),
                     [](const GroupState& state) { return state.layouts == state.group->layouts; });
}

void Optimizer::prepare() { follow(Frozen::goes); }

// Who only looks at the state leaves moments of what is frozen to a step or prepare: it may be
// thawed before that.
void Optimizer::follow(Frozen moments) {
  if (is_current() && !(moments == Frozen::goes && holds_frozen_)) return;
  if (log_->prepared == 0) {
    states_.clear();
    for (Own& own : own_) {
      own.offset = -1;
      own.kept.clear();
    }
  }
  Before before{own_, std::exchange(states_, {})};
  try {
    make_states(before, moments);
  } catch (...) {
    own_ = std::move(before.own);
    states_ = std::move(before.states);
    log_->tables = 0;
    throw;
  }
}

void Optimizer::make_states(const Before& before, Frozen moments) {
  TESSERA_EXPECT(!own_.empty(), "optimizer: no parameters given");
  parts_ = std::make_shared<std::vector<GroupPart>>(parts_of(parameters()));
  const std::size_t kinds = kinds_.size();
  const Device device = parts_->front().group->device;
  std::unordered_map<const FlatGroup*, std::size_t> group_at;
  std::vector<std::vector<Own*>> own(parts_->size() * kinds);  // of each kind in each group
  for (const GroupPart& part : *parts_) {
    const std::shared_ptr<FlatGroup>& group = part.group;
    TESSERA_EXPECT(device == group->device,
                   "optimizer: parameter groups lie on different devices; use one optimizer each");
    group_at.emplace(group.get(), group_at.size());
    std::erase_if(group->updates, [this](const auto& of) { return of.second == log_; });
  }
  std::map<FlatGroup*, int> first_entries;
  for (Own& one : own_) {
    const auto& state = state_of(one.parameter);
    own[group_at.at(state->group.get()) * kinds + one.kind].push_back(&one);
    const auto [first, is_new] = first_entries.try_emplace(state->group.get(), state->entry);
    first->second = std::min(first->second, state->entry);
  }
  for (const auto& [group, entry] : first_entries) group->updates.emplace(entry, log_);
  bool has_new = false;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].empty()) continue;
    for (Own* const one : own[i]) one->state = states_.size();
    const std::shared_ptr<FlatGroup>& group = (*parts_)[i / kinds].group;
    GroupState& state = states_.emplace_back(
        GroupState{.group = group, .layouts = group->layouts, .kind = i % kinds});
    has_new = take_moments(state, own[i], lay_out(state, own[i], moments), before) || has_new;
    has_new = take_states(state, own[i], before) || has_new;
  }
  holds_frozen_ = std::ranges::any_of(
      own_, [](const Own& one) { return one.offset >= 0 && !one.parameter.trainable(); });
  has_laid_out();
  const Event made = device.compute().record();
  if (log_->stream != made.stream && !log_->queued.empty()) {  // they are of the other side
    static_cast<void>(steps());                                // asks those that may not count
    device.block(device.stream(log_->stream).record());
    log_->queued.clear();
  }
  // Moments of before go when those that follow them are there: a step that fails has either.
  if (has_new && !before.states.empty()) device.block(made);
  if (!scalars_.defined() || !(scalars_.device() == device)) {
    const OwnerGuard owner(device, "scalars");
    scalars_ =
        Tensor::empty({static_cast<std::int64_t>(kinds_[0].needs.scalar_bytes) / 4}, f32, device);
  }
  rates_changed_ = are_set_ = false;
  if (std::exchange(log_->stream, made.stream) != made.stream) log_->prepared = 0;  // its ticks
  log_->tables = std::max<Tick>(1, made.tick);
  if (has_new || log_->prepared == 0) log_->prepared = log_->tables;
  for (std::size_t i = 0; i < before.own.size(); ++i)
    if (before.own[i].offset >= 0 && own_[i].offset < 0) log_->has_dropped = true;
}

// The segments of a group, and where the moments of those that are the optimizer's lie; returns
// how many elements each has.
std::int64_t Optimizer::lay_out(GroupState& state, const std::vector<Own*>& own, Frozen moments) {
  const FlatGroup& group = *state.group;
  const auto entry_of = [&](const Own* one) -> const FlatEntry& {
    return state_of(one->parameter)->flat_entry();
  };
  std::vector<Own*> kept;
  for (Own* const one : own) {
    const bool has_any = std::exchange(one->offset, -1) >= 0;
    if (one->parameter.trainable() || (has_any && moments == Frozen::stays)) kept.push_back(one);
  }
  std::sort(kept.begin(), kept.end(),
            [&](const Own* a, const Own* b) { return entry_of(a).offset < entry_of(b).offset; });
  std::vector<FlatSegment> segments;
  std::int64_t numel = 0;
  for (Own* const one : kept) {
    const FlatEntry& entry = entry_of(one);
    one->spec = one->parameter.spec();
    one->offset = numel;
    numel += round_up(entry.chunk, kFlatAlign);
    if (!one->parameter.trainable()) continue;
    if (entry.numel == 0 || entry.trainable < 0) continue;  // thawed: it has no gradient yet
    segments.push_back({.begin = entry.offset,
                        .end = entry.offset + entry.numel,
                        .gradient_shift = entry.gradient_offset - entry.offset,
                        .moment_shift = one->offset - entry.offset,
                        .count_index = entry.trainable,
                        .lr_factor = static_cast<float>(one->lr_factor),
                        .weight_decay = static_cast<float>(one->weight_decay),
                        .unused = 0});
  }
  state.segment_count = static_cast<std::int32_t>(segments.size());
  if (!segments.empty()) {
    const OwnerGuard owner(group.device, "tables");
    const auto bytes = std::as_bytes(std::span(segments));
    state.segments =
        Tensor::from_bytes(bytes, {static_cast<std::int64_t>(bytes.size()) / 8}, i64, group.device);
  }
  return numel;
}

// The moments of a group, [numel] each: those that were there, where all lie as they did; else new
// ones, 0, with copies of what was there. True: of new ones.
bool Optimizer::take_moments(GroupState& state, const std::vector<Own*>& own, std::int64_t numel,
                             const Before& before) const {
  const auto was = [&](const Own* one) -> const Own& {
    return before.own[static_cast<std::size_t>(one - own_.data())];
  };
  const auto held = [&](const Own* one) -> const GroupState& {
    return before.states[was(one).state];
  };
  const auto has_any = [](const Own* one) { return one->offset >= 0; };
  const int moments = kinds_[state.kind].needs.moments;
  if (moments == 0 || std::ranges::none_of(own, has_any)) return false;
  const auto stays = [&](const Own* one) {
    return was(one).offset == one->offset &&
           (one->offset < 0 ||
            (held(one).group == state.group && held(one).moments[0].numel() == numel));
  };
  if (std::ranges::all_of(own, stays)) {
    state.moments = held(*std::ranges::find_if(own, has_any)).moments;
    return false;
  }
  const OwnerGuard owner(state.group->device, "moments");
  for (int k = 0; k < moments; ++k)
    state.moments.push_back(Tensor::zeros({numel}, f32, state.group->device));
  for (const Own* const one : own)
    if (has_any(one) && was(one).offset >= 0 && one->spec.local_shape().numel() > 0)
      keep_moments(was(one), held(one), *one, state);
  return true;
}

// Those of a parameter that was whole become this rank's rows of them.
void Optimizer::keep_moments(const Own& from, const GroupState& held, const Own& to,
                             const GroupState& state) {
  const Shape whole = from.spec.local_shape(), local = to.spec.local_shape();
  for (std::size_t k = 0; k < held.moments.size(); ++k) {
    Tensor rows = held.moments[k].view(whole, from.spec.strides(whole), from.offset);
    if (from.spec.world < to.spec.world) rows = rows_of(rows, to.spec);
    raw::copy_into(state.moments[k].view(local, to.spec.strides(local), to.offset), rows);
  }
}

}  // namespace tessera::optim
