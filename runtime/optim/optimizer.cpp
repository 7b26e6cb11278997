#include "tessera/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/device/queue.hpp"
#include "runtime/optim/gradients.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/param/update_log.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {

void Optimizer::expect_rate(const char* what, double value) {
  TESSERA_EXPECT(value >= 0 && std::isfinite(value), what, " is ", value,
                 ", expected a finite number of at least 0");
}
void Optimizer::expect_steps(const char* what, std::int64_t steps) {
  TESSERA_EXPECT(steps >= 0 && steps <= std::int64_t{1} << 53, what, " is ", steps,
                 ", expected 0 to 2^53, which a double counts exactly");
}

Optimizer::Optimizer(const std::vector<Parameter>& parameters, double lr, double weight_decay,
                     const Needs& needs)
    : Optimizer(lr, {{.needs = needs, .weight_decay = weight_decay}}) {
  TESSERA_EXPECT(!parameters.empty(), "optimizer: no parameters given");
  add_parameters(parameters);
}

Optimizer::Optimizer(double lr, const std::vector<Kind>& kinds)
    : lr_(lr), kinds_(kinds), log_(std::make_shared<UpdateLog>()) {
  TESSERA_EXPECT(!kinds.empty(), "optimizer: no kind of parameters is given");
  expect_rate("optimizer: lr", lr);
  for (const Kind& kind : kinds) {
    const Needs& needs = kind.needs;
    expect_rate("optimizer: weight_decay", kind.weight_decay);
    expect_rate("optimizer: lr_factor", kind.lr_factor);
    TESSERA_EXPECT(needs.moments >= 0 && needs.moments <= kernels::kMostMoments,
                   "optimizer: an update has 0 to ", kernels::kMostMoments,
                   " arrays of state, not ", needs.moments);
    TESSERA_EXPECT(needs.scalar_bytes > 0 && needs.scalar_bytes % 4 == 0 &&
                       needs.scalar_bytes <= kernels::kMostScalarBytes &&
                       needs.scalar_bytes == kinds[0].needs.scalar_bytes,
                   "optimizer: Needs::scalar_bytes is ", needs.scalar_bytes,
                   "; expected a multiple of 4 up to ", kernels::kMostScalarBytes,
                   ", the same for each kind of parameters");
  }
}

void Optimizer::add_parameters(const std::vector<Parameter>& parameters) { add(parameters, 0); }

void Optimizer::add(const std::vector<Parameter>& parameters, std::size_t kind) {
  for (const Parameter& p : parameters)
    TESSERA_EXPECT(p.defined(), "optimizer: an undefined parameter was given");
  const Kind& rates = kinds_.at(kind);
  for (const Parameter& p : parameters)
    if (own_of_.try_emplace(p.id(), own_.size()).second)
      own_.push_back({.parameter = p,
                      .kind = kind,
                      .weight_decay = rates.weight_decay,
                      .lr_factor = rates.lr_factor});
  rates_changed_ = true;
  ++decisions().count;
}

void Optimizer::set_lr(double lr) {
  expect_rate("Optimizer::set_lr: lr", lr);
  lr_ = lr;
}

void Optimizer::set(const char* what, double Own::* rate, const std::vector<Parameter>& of,
                    double value) {
  expect_rate(what, value);
  for (const Parameter& p : of) {
    const auto own = own_of_.find(p.id());
    TESSERA_EXPECT(own != own_of_.end(), what, ": parameter '", p.defined() ? p.name() : "",
                   "' is not this optimizer's");
    own_[own->second].*rate = value;
  }
  rates_changed_ = true;
  ++decisions().count;
}
void Optimizer::set_weight_decay(const std::vector<Parameter>& of, double weight_decay) {
  set("Optimizer::set_weight_decay: weight_decay", &Own::weight_decay, of, weight_decay);
}
void Optimizer::set_lr_factor(const std::vector<Parameter>& of, double factor) {
  set("Optimizer::set_lr_factor: factor", &Own::lr_factor, of, factor);
}

void Optimizer::set_steps(std::int64_t steps) {
  expect_steps("Optimizer::set_steps: steps", steps);
  log_->steps += steps - this->steps();
  if (log_->told > 0) log_->tell();
}
std::int64_t Optimizer::steps() const {
  for (UpdateLog::Update& update : log_->queued) {
    if (!update.was_skipped) continue;
    if (update.was_skipped()) log_->take_back();  // throws where the device has failed
    update.was_skipped = {};
  }
  return log_->steps;
}

// By a kernel whose arguments hold the values.
void Optimizer::put(const Tensor& to, const void* scalars, std::size_t bytes) {
  TESSERA_EXPECT(to.numel() * 4 == static_cast<std::int64_t>(bytes), "put_scalars: ", bytes,
                 " bytes for scalars of ", to.numel() * 4, "; is Needs::scalar_bytes their size?");
  kernels::PutScalarsArgs args{};
  args.out = to.data();
  args.count = static_cast<std::int32_t>(bytes / 4);
  std::memcpy(args.values, scalars, bytes);
  if (StepMemory* const step = StepMemory::of(to.device())) {
    const auto value = step->value_of(reinterpret_cast<std::uintptr_t>(to.data()), args.count * 4);
    std::memcpy(value.host, scalars, bytes);
    if (!to.device().context().is_capturing()) return;
    return detail::launch_body("optimizer_scalars", to.device(),
                               Body([out = to.data(), from = value.device, n = args.count * 4](
                                        Exec& exec) { queue_copy(exec, out, from, n); }),
                               {detail::writes(to)});
  }
  detail::launch("optimizer_scalars", to.device(), detail::table(to.device()).put_scalars, args,
                 {detail::writes(to)});
}

namespace {

FlatUpdate arrays_of(const Optimizer::GroupState& state, const Tensor& scalars) {
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

}  // namespace

FlatUpdate Optimizer::pointers(const GroupState& state, const Tensor& scalars) {
  state.group->apply_factor();  // of which a body from outside knows nothing
  return arrays_of(state, scalars);
}

void Optimizer::submit(const char* name, const GroupState& state, const Tensor& scalars,
                       const Body& body) {
  const FlatGroup& group = *state.group;
  const Tensor none;
  const auto moment = [&](std::size_t k) -> const Tensor& {
    return k < state.moments.size() ? state.moments[k] : none;
  };
  detail::launch_body(
      name, group.device, body,
      {detail::reads(group.gradient), detail::reads(group.factor), detail::reads(state.segments),
       detail::reads(scalars), detail::updates(group.values), detail::updates(moment(0)),
       detail::updates(moment(1)), detail::updates(moment(2))});
}

void Optimizer::launch_update(kernels::UpdateOp op, const GroupState& state,
                              const Tensor& scalars) {
  const FlatUpdate update = arrays_of(state, scalars);
  kernels::UpdateArgs args{};
  args.values = update.values;
  std::copy_n(update.moments, kernels::kMostMoments, args.moments);
  args.gradient = update.gradient;
  args.segments = update.segments;
  args.counts = update.counts;
  args.scalars = static_cast<const kernels::UpdateScalars*>(update.scalars);
  if (const Tensor& factor = state.group->factor; factor.defined())
    args.clip = reinterpret_cast<const float*>(factor.data());
  args.segment_count = update.segment_count;
  args.op = op;
  const auto kernel = detail::table(state.group->device).update;
  submit(name(op), state, scalars, Body(kernels::Call<kernels::UpdateArgs>{kernel, args}));
}

// --- a step ---

namespace {

// Copies `flag`, boolean [], to the host when the device comes to it. What is returned blocks until
// then and says whether it was false; in a plan it is true.
std::function<bool()> read_later(const Tensor& flag) {
  const Device& device = flag.device();
  HostStaging& staging = Memory::of(device).staging();
  const std::shared_ptr<HostStaging::Piece> piece(
      &staging.take(1),
      [device](HostStaging::Piece* p) { Memory::of(device).staging().give_back(*p); });
  const Access accesses[] = {flag.access(AccessMode::read),
                             {&piece->use, piece->data, piece->data + 1, AccessMode::write}};
  device.compute().launch(
      {.name = "copy_to_host", .cost = {.bytes = 2}, .accesses = accesses},
      [to = piece->data, from = flag.data()](Exec& exec) { queue_copy(exec, to, from, 1); });
  return [device, piece, landed = device.compute().record()] {
    device.context().block(landed);
    device.context().host_reads(piece->data, 1);
    return device.runs_bodies() && *piece->data == std::byte{0};
  };
}

}  // namespace

void Optimizer::count_step() {
  ++log_->steps;
  log_->tell();
  scalars_.device().context().commit();
  for (const GroupState& state : states_)
    for (Communicator* const comm : {state.group->sums.get(), state.group->replicas.get()})
      if (comm) comm->count_step();
}

void Optimizer::forget_done_updates() {
  const Tick done = scalars_.device().context().host_clock()[log_->stream];
  std::erase_if(log_->queued, [&](const UpdateLog::Update& update) { return update.last <= done; });
}

void Optimizer::count_replays(StepMemory& step) {
  std::vector<std::shared_ptr<FlatGroup>> updated;
  for (const GroupState& state : states_) {
    state.group->note_gradient();
    if (state.group->gradient.defined()) updated.push_back(state.group);
  }
  step.before_replay([this, updated, alive = std::weak_ptr(log_)] {
    TESSERA_EXPECT(!alive.expired(), "captured step: its optimizer is gone; make the step again");
    forget_done_updates();
    // The graph is what comes next, and the host never blocks on less than all of it.
    const Tick first = scalars_.device().context().clock(log_->stream)[log_->stream] + 1;
    log_->queued.push_back({.first = first, .last = first});
    count_step();
    write_scalars(scalars_, log_->steps);
    for (const auto& group : updated) {
      group->mark_updated();
      ++group->values.storage()->version;  // for what saved them where they are whole
    }
  });
}

void Optimizer::step() { update_all({}); }

void Optimizer::step_if(const Tensor& condition) {
  TESSERA_EXPECT(condition.dtype() == boolean && condition.numel() == 1,
                 "step_if: the condition is ", condition.dtype(), " of ", condition.shape(),
                 ", expected one boolean");
  TESSERA_EXPECT(!StepMemory::is_inside(condition.device()),
                 "captured step: step_if may leave a step out, and replays can't; train in bf16, "
                 "without a GradScaler");
  update_all(condition);
}

void Optimizer::update_all(const Tensor& given) {
  prepare();
  TESSERA_EXPECT(!given.defined() || given.device().is_beside(scalars_.device()),
                 "step_if: the condition lies on another device than the parameters; move it");
  const Tensor condition = given.defined() ? raw::moved(given, scalars_.device()) : given;
  if (!are_set_ && scalars_.device().runs_bodies())
    for (const Own& own : own_)
      TESSERA_EXPECT(own.offset < 0 || state_of(own.parameter)->is_set, "step: parameter '",
                     own.parameter.name(),
                     "' was never given values; call nn::init, load or assign on every rank");
  are_set_ = true;
  for (const GroupState& state : states_)
    if (!state.group->unreduced.empty())
      for (const GroupPart& part : *parts_) part.expect_reduced("step");
  DeviceContext& device = scalars_.device().context();
  const StreamId stream = log_->stream;
  const auto now = [&] { return device.clock(stream)[stream]; };
  states_[0].group->await_readers();
  write_scalars(scalars_, steps() + 1);
  if (StepMemory* const step = StepMemory::of(scalars_.device())) count_replays(*step);
  forget_done_updates();
  if (condition.defined()) {  // where it does not hold, no rank had a gradient
    const Tensor factor = raw::cast(condition, f32);
    for (const GroupPart& part : *parts_)
      for (const GroupPart::Stretch& stretch : part.stretches)
        if (part.group->gradient.defined())
          detail::multiply("skip_step", part.counts(stretch), factor);
  }
  const Tick before = now();
  UpdateLog::Update done{.first = before + 1};
  try {
    for (const GroupState& state : states_) {
      if (!state.group->gradient.defined()) continue;
      state.group->await_reduced();
      if (state.segment_count > 0) update(state, scalars_);
      state.group->mark_updated();  // also of an empty shard: its unit is gathered on every rank
    }
    is_written_.assign(states_.size(), false);
    update_together(scalars_);
    for (std::size_t i = 0; i < states_.size(); ++i)
      if (is_written_[i]) states_[i].group->mark_updated();
    // Without rows, or gradients: whether the step came so far is to be known of it, too.
    if (now() == before) Stream(device, stream).launch({.name = "update_no_rows"}, [](Exec&) {});
    if (condition.defined()) done.was_skipped = read_later(condition);
  } catch (...) {
    if (now() > before) {  // some groups are a step ahead of the others, if it comes to run
      log_->queued.push_back({before + 1, now(), true});
      for (const GroupState& state : states_)  // of a frozen base nothing was to be updated
        if (state.group->gradient.defined()) state.group->is_consistent = false;
    }
    throw;
  }
  done.last = now();
  done.has_dropped = std::exchange(log_->has_dropped, false);
  if (done.last > before) log_->queued.push_back(std::move(done));
  count_step();
}

void Optimizer::zero_grad() {
  const auto parts = this->parts();
  for (const GroupPart& part : *parts) part.drop_gradient();
}

}  // namespace tessera::optim
