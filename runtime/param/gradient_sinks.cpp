#include "runtime/param/gradient_sinks.hpp"

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"

namespace tessera {
namespace {

// The padding between and behind the entries, as a table for kernels::Flat::complete.
Tensor padding_table(const FlatGroup& group) {
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < group.trainable.size(); ++i) {
    const FlatEntry& e = group.trained(i);
    rows.insert(rows.end(),
                {e.gradient_offset * 4, e.numel * 4, round_up(e.chunk, kFlatAlign) * 4});
  }
  const OwnerGuard owner(group.device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(group.trainable.size()), 3}, group.device);
}

}  // namespace

// What a step that failed has laid out may never have come to the device.
bool LocalGradient::is_laid_out() const {
  return layouts_ == group_->layouts && recoveries_ == group_->device.recoveries();
}

void LocalGradient::lay_out() {
  layouts_ = group_->layouts;
  recoveries_ = group_->device.recoveries();
  padding_ = padding_table(*group_);
  arrived_ = held_ = ArrivalMask(group_->trainable.size());
  if (group_->gradient.defined()) held_.fill();
}

autograd::GradientSink LocalGradient::sink(int i, double scale) {
  if (!is_laid_out()) lay_out();
  if (!group_->gradient.defined()) {
    group_->note_gradient();
    const OwnerGuard owner(group_->device, "gradients");
    group_->gradient =
        Tensor::empty({group_->gradient_numel + group_->counts_numel()}, f32, group_->device);
    fresh_ = true;
    held_.clear();
  }
  group_->apply_factor();
  const auto at = static_cast<std::size_t>(i);
  const FlatEntry& entry = group_->trained(at);
  const std::shared_ptr<ParameterState> p = entry.parameter.lock();
  arrived_.add(at);
  const bool is_there = held_.add(at);
  return {group_->gradient.view(p->shape, p->spec.strides(p->shape), entry.gradient_offset), scale,
          is_there};
}

void LocalGradient::complete() {
  if (!group_->gradient.defined()) return;
  if (!is_laid_out()) lay_out();  // no sink was asked for since
  const Tensor counts = group_->counts();
  for (std::size_t word = 0; word < arrived_.words(); ++word) {
    kernels::CompleteArgs args{};
    args.base = group_->gradient.data();
    args.entries = reinterpret_cast<const kernels::FlatSpan*>(padding_.data());
    args.counts = counts.data();
    args.arrived = arrived_.take_word(word);
    args.first = static_cast<std::int32_t>(word * 64);
    args.entry_count = static_cast<std::int32_t>(group_->trainable.size());
    args.copies = 1;
    args.dtype = f32;
    args.zero_missing = fresh_;
    // Gaps and counts: next to nothing, unless gradients are missing.
    detail::launch("complete_gradient", group_->device, detail::table(group_->device).complete,
                   args, {detail::reads(padding_), {&group_->gradient, AccessMode::write, 0}});
  }
  if (fresh_) held_.fill();
  fresh_ = false;
}

void LocalGradient::abandon() noexcept {
  if (arrived_.empty()) return;
  arrived_.clear();
  group_->drop_gradient();
}

}  // namespace tessera
