#include "tessera/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/tensor/launch.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

void expect_rate(const char* what, double value) {
  TESSERA_EXPECT(value >= 0 && std::isfinite(value), what, " is ", value,
                 ", expected a finite number of at least 0");
}

}  // namespace

Optimizer::Optimizer(std::vector<Parameter> parameters, double lr, double weight_decay,
                     const Needs& needs)
    : parameters_(std::move(parameters)),
      lr_(lr),
      weight_decays_(parameters_.size(), weight_decay),
      needs_(needs) {
  TESSERA_EXPECT(!parameters_.empty(), "optimizer: no parameters given");
  for (const Parameter& p : parameters_)
    TESSERA_EXPECT(p.defined(), "optimizer: an undefined parameter was given");
  expect_rate("optimizer: lr", lr);
  expect_rate("optimizer: weight_decay", weight_decay);
  TESSERA_EXPECT(needs.moments >= 0 && needs.moments <= kernels::kMostMoments,
                 "optimizer: an update has 0 to ", kernels::kMostMoments, " arrays of state, not ",
                 needs.moments);
  TESSERA_EXPECT(needs.scalar_bytes > 0 && needs.scalar_bytes % 4 == 0 &&
                     needs.scalar_bytes <= kernels::kMostScalarBytes,
                 "optimizer: the scalars of a step are 4 to ", kernels::kMostScalarBytes,
                 " bytes, whole words, not ", needs.scalar_bytes);
}

void Optimizer::set_lr(double lr) {
  expect_rate("Optimizer::set_lr: lr", lr);
  lr_ = lr;
}

void Optimizer::set_weight_decay(const std::vector<Parameter>& of, double weight_decay) {
  expect_rate("Optimizer::set_weight_decay: weight_decay", weight_decay);
  TESSERA_EXPECT(
      log_->prepared == 0,
      "Optimizer::set_weight_decay: the state is made, and the rates lie in it; set them "
      "before prepare() and the first step");
  for (const Parameter& p : of) {
    const auto own = std::find(parameters_.begin(), parameters_.end(), p);
    TESSERA_EXPECT(own != parameters_.end(), "Optimizer::set_weight_decay: parameter '", p.name(),
                   "' is not this optimizer's");
    weight_decays_[static_cast<std::size_t>(own - parameters_.begin())] = weight_decay;
  }
}

void Optimizer::set_steps(std::int64_t steps) {
  TESSERA_EXPECT(steps >= 0 && steps <= std::int64_t{1} << 53, "Optimizer::set_steps: steps is ",
                 steps, ", expected 0 to 2^53, which a double counts exactly");
  log_->steps = steps;
}

// By a kernel whose arguments hold the values.
void Optimizer::put(const Tensor& to, const void* scalars, std::size_t bytes) {
  TESSERA_EXPECT(to.numel() * 4 == static_cast<std::int64_t>(bytes), "put_scalars: ", bytes,
                 " bytes for scalars of ", to.numel() * 4, "; is Needs::scalar_bytes their size?");
  kernels::PutScalarsArgs args{};
  args.out = to.data();
  args.count = static_cast<std::int32_t>(bytes / 4);
  std::memcpy(args.values, scalars, bytes);
  tessera::detail::launch("optimizer_scalars", to.device(),
                          tessera::detail::table(to.device()).put_scalars, args,
                          {tessera::detail::writes(to)});
}

FlatUpdate Optimizer::pointers(const GroupState& state, const Tensor& scalars) {
  const FlatGroup& group = *state.group;
  FlatUpdate update{};
  update.values = reinterpret_cast<float*>(group.values.data());
  update.gradient = reinterpret_cast<const float*>(group.gradient.data());
  for (std::size_t k = 0; k < state.moments.size(); ++k)
    update.moments[k] = reinterpret_cast<float*>(state.moments[k].data());
  update.segments = reinterpret_cast<const FlatSegment*>(state.segments.data());
  update.counts = reinterpret_cast<const float*>(group.counts().data());
  update.scalars = scalars.data();
  update.segment_count = state.segment_count;
  return update;
}

void Optimizer::submit(const char* name, const GroupState& state, const Tensor& scalars,
                       const Body& body) {
  const FlatGroup& group = *state.group;
  const Tensor none;
  const auto moment = [&](std::size_t k) -> const Tensor& {
    return k < state.moments.size() ? state.moments[k] : none;
  };
  tessera::detail::launch_body(
      name, group.device, body,
      {tessera::detail::reads(group.gradient), tessera::detail::reads(state.segments),
       tessera::detail::reads(scalars), tessera::detail::updates(group.values),
       tessera::detail::updates(moment(0)), tessera::detail::updates(moment(1)),
       tessera::detail::updates(moment(2))});
}

void Optimizer::launch_update(kernels::UpdateOp op, const GroupState& state,
                              const Tensor& scalars) {
  const FlatUpdate update = pointers(state, scalars);
  kernels::UpdateArgs args{};
  args.values = update.values;
  std::copy_n(update.moments, kernels::kMostMoments, args.moments);
  args.gradient = update.gradient;
  args.segments = update.segments;
  args.counts = update.counts;
  args.scalars = static_cast<const kernels::UpdateScalars*>(update.scalars);
  args.segment_count = update.segment_count;
  args.op = op;
  const auto kernel = tessera::detail::table(state.group->device).update;
  submit(name(op), state, scalars, Body(kernels::Call<kernels::UpdateArgs>{kernel, args}));
}

Optimizer::GroupState Optimizer::make_state(const std::shared_ptr<FlatGroup>& group) const {
  GroupState state{group, {}, {}, 0};
  std::vector<FlatSegment> segments;
  for (std::size_t i = 0; i < group->entries.size(); ++i) {
    const FlatEntry& entry = group->entries[i];
    const auto ours = std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
      return p.trainable() && p.state()->group == group && p.state()->entry == static_cast<int>(i);
    });
    if (entry.numel == 0 || ours == parameters_.end()) continue;
    const auto rate = weight_decays_[static_cast<std::size_t>(ours - parameters_.begin())];
    segments.push_back({entry.offset, entry.offset + entry.numel, static_cast<std::int32_t>(i),
                        static_cast<float>(rate)});
  }
  const bool any = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
    return p.trainable() && p.state()->group == group;
  });
  if (!any) return state;
  state.segment_count = static_cast<std::int32_t>(segments.size());
  if (!segments.empty()) {
    const OwnerGuard owner(group->device, "tables");
    const auto bytes = std::as_bytes(std::span(segments));
    state.segments = Tensor::from_bytes(bytes, {static_cast<std::int64_t>(bytes.size()) / 8}, i64,
                                        group->device);
  }
  const OwnerGuard owner(group->device, "moments");
  for (int k = 0; k < needs_.moments; ++k)
    state.moments.push_back(Tensor::zeros({group->numel}, f32, group->device));
  return state;
}

void Optimizer::prepare() {
  if (log_->prepared > 0) return;
  const auto groups = groups_of(parameters_);
  states_.clear();
  for (const auto& group : groups) {
    TESSERA_EXPECT(groups[0]->device == group->device,
                   "optimizer: parameter groups lie on different devices; use one optimizer each");
    states_.push_back(make_state(group));
    auto& logs = group->updates;
    if (std::find(logs.begin(), logs.end(), log_) == logs.end()) logs.push_back(log_);
  }
  const Device& device = groups[0]->device;
  const OwnerGuard owner(device, "scalars");
  scalars_ = Tensor::empty({static_cast<std::int64_t>(needs_.scalar_bytes) / 4}, f32, device);
  log_->prepared = std::max<Tick>(1, device.compute().clock()[StreamId::compute]);
}

void Optimizer::step() {
  prepare();
  DeviceContext& device = scalars_.device().context();
  const auto now = [&] { return device.clock(StreamId::compute)[StreamId::compute]; };
  std::erase_if(log_->queued, [&](const UpdateLog::Update& update) {
    return update.last <= device.host_clock()[StreamId::compute];
  });
  device.wait(StreamId::compute, device.record(StreamId::gather));  // it may still read values
  write_scalars(scalars_, steps() + 1);
  const Tick before = now();
  try {
    for (const GroupState& state : states_) {
      if (!state.group->gradient.defined()) continue;
      state.group->await_gradient();
      if (state.segment_count > 0) update(state, scalars_);
      state.group->mark_updated();  // also of an empty shard: its unit is gathered on every rank
    }
  } catch (...) {
    if (now() > before) {  // some groups are a step ahead of the others, if it comes to run
      log_->queued.push_back({before + 1, now(), true});
      for (const GroupState& state : states_) state.group->is_consistent = false;
    }
    throw;
  }
  if (now() > before) log_->queued.push_back({before + 1, now()});
  ++log_->steps;
}

void Optimizer::zero_grad() {
  for (const GroupPart& part : parts_of(parameters_)) {
    if (part.is_whole()) part.group->gradient = {};
    if (!part.group->gradient.defined()) continue;
    for (const GroupPart::Run& run : part.runs) {
      raw::fill(part.gradient(run), 0);
      raw::fill(part.counts(run), 0);
    }
  }
}

}  // namespace tessera::optim
