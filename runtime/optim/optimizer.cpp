#include "tessera/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/device/queue.hpp"
#include "runtime/optim/gradients.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
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
  TESSERA_EXPECT(!kinds.empty(), "optimizer: has no kind of parameters");
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
                   "optimizer: the scalars of a step are 4 to ", kernels::kMostScalarBytes,
                   " bytes, whole words, as many for each kind of parameters, not ",
                   needs.scalar_bytes);
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
}
std::int64_t Optimizer::steps() const {
  for (UpdateLog::Update& update : log_->queued) {
    if (!update.was_skipped) continue;
    if (update.was_skipped()) --log_->steps;  // throws where the device has failed
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
  detail::launch("optimizer_scalars", to.device(), detail::table(to.device()).put_scalars, args,
                 {detail::writes(to)});
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
  detail::launch_body(
      name, group.device, body,
      {detail::reads(group.gradient), detail::reads(state.segments), detail::reads(scalars),
       detail::updates(group.values), detail::updates(moment(0)), detail::updates(moment(1)),
       detail::updates(moment(2))});
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
  const auto kernel = detail::table(state.group->device).update;
  submit(name(op), state, scalars, Body(kernels::Call<kernels::UpdateArgs>{kernel, args}));
}

// --- the state ---

std::vector<Parameter> Optimizer::parameters() const {
  std::vector<Parameter> all;
  for (const Own& own : own_) all.push_back(own.parameter);
  return all;
}

std::vector<Tensor> Optimizer::moments(const Parameter& of) const {
  const auto found = own_of_.find(of.id());
  TESSERA_EXPECT(found != own_of_.end(), "Optimizer::moments: parameter '",
                 of.defined() ? of.name() : "", "' is not this optimizer's");
  const Own& own = own_[found->second];
  if (log_->prepared == 0 || own.offset < 0) return {};
  const Shape local = own.spec.local_shape();
  std::vector<Tensor> rows;
  for (const Tensor& moment : states_[own.state].moments)
    rows.push_back(moment.view(local, local.strides(), own.offset));
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

void Optimizer::prepare() {
  if (is_current()) return;
  if (log_->prepared == 0) {
    states_.clear();
    for (Own& own : own_) own.offset = -1;
  }
  Before before{own_, std::exchange(states_, {})};
  try {
    make_states(before);
  } catch (...) {
    own_ = std::move(before.own);
    states_ = std::move(before.states);
    log_->tables = 0;
    throw;
  }
}

void Optimizer::make_states(const Before& before) {
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
    auto& logs = group->updates;
    if (std::find(logs.begin(), logs.end(), log_) == logs.end()) logs.push_back(log_);
  }
  for (Own& one : own_)
    own[group_at.at(state_of(one.parameter)->group.get()) * kinds + one.kind].push_back(&one);
  bool has_new = false;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].empty()) continue;
    for (Own* const one : own[i]) one->state = states_.size();
    const std::shared_ptr<FlatGroup>& group = (*parts_)[i / kinds].group;
    GroupState& state = states_.emplace_back(
        GroupState{.group = group, .layouts = group->layouts, .kind = i % kinds});
    has_new = take_moments(state, own[i], lay_out(state, own[i]), before) || has_new;
  }
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
}

// The segments of a group, and where the moments of those that are the optimizer's lie; returns
// how many elements each has.
std::int64_t Optimizer::lay_out(GroupState& state, const std::vector<Own*>& own) {
  const FlatGroup& group = *state.group;
  const auto entry_of = [&](const Own* one) -> const FlatEntry& {
    return state_of(one->parameter)->flat_entry();
  };
  std::vector<Own*> trained;
  for (Own* const one : own) {
    one->offset = -1;
    if (one->parameter.trainable()) trained.push_back(one);
  }
  std::sort(trained.begin(), trained.end(),
            [&](const Own* a, const Own* b) { return entry_of(a).offset < entry_of(b).offset; });
  std::vector<FlatSegment> segments;
  std::int64_t numel = 0;
  for (Own* const one : trained) {
    const FlatEntry& entry = entry_of(one);
    one->spec = one->parameter.spec();
    one->offset = numel;
    numel += round_up(entry.chunk, kFlatAlign);
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
    Tensor rows = held.moments[k].view(whole, whole.strides(), from.offset);
    if (from.spec.world < to.spec.world && whole.ndim() > 0)
      rows = raw::slice(rows, 0, to.spec.owned().begin, to.spec.owned().end);
    raw::copy_into(state.moments[k].view(local, local.strides(), to.offset), rows);
  }
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

void Optimizer::step() { update_all({}); }

void Optimizer::step_if(const Tensor& condition) {
  TESSERA_EXPECT(condition.dtype() == boolean && condition.numel() == 1,
                 "step_if: the condition is ", condition.dtype(), " of ", condition.shape(),
                 ", expected one boolean");
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
                     "' has the zeros of its memory; call nn::init, load or assign on every rank");
  are_set_ = true;
  for (const GroupState& state : states_)
    if (!state.group->unreduced.empty())
      for (const GroupPart& part : *parts_) part.expect_reduced("step");
  DeviceContext& device = scalars_.device().context();
  const StreamId stream = log_->stream;
  const auto now = [&] { return device.clock(stream)[stream]; };
  states_[0].group->await_readers();
  write_scalars(scalars_, steps() + 1);
  std::erase_if(log_->queued, [&](const UpdateLog::Update& update) {
    return update.last <= device.host_clock()[stream];
  });
  if (condition.defined()) {  // where it does not hold, no rank had a gradient
    const Tensor factor = raw::cast(condition, f32);
    for (const GroupPart& part : *parts_)
      for (const GroupPart::Stretch& stretch : part.stretches)
        if (part.group->gradient.defined()) multiply("skip_step", part.counts(stretch), factor);
  }
  const Tick before = now();
  UpdateLog::Update done{.first = before + 1};
  bool is_due = false;
  try {
    for (const GroupState& state : states_) {
      if (!state.group->gradient.defined()) continue;
      is_due = true;
      state.group->await_gradient();
      if (state.segment_count > 0) update(state, scalars_);
      state.group->mark_updated();  // also of an empty shard: its unit is gathered on every rank
    }
    update_together(scalars_);
    // A rank without rows: whether the step came so far is to be known of it, too.
    if (is_due && now() == before)
      Stream(device, stream).launch({.name = "update_no_rows"}, [](Exec&) {});
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
  if (done.last > before) log_->queued.push_back(std::move(done));
  ++log_->steps;
}

namespace {

void drop_unreduced(const GroupPart& part) {
  for (const auto& [first, end] : part.stretches)
    for (std::size_t i = first; i < end && !part.group->unreduced.empty(); ++i)
      if (const auto p = part.group->trained(i).parameter.lock(); p && p->slices)
        p->slices->drop_unreduced();
      else if (p && p->sinks)
        p->sinks->drop_unreduced(static_cast<int>(i));
}

}  // namespace

void Optimizer::zero_grad() {
  const auto parts = this->parts();
  for (const GroupPart& part : *parts) {
    drop_unreduced(part);
    if (part.is_whole()) part.group->gradient = {};
    if (!part.group->gradient.defined()) continue;
    for (const GroupPart::Stretch& stretch : part.stretches) {
      raw::fill(part.gradient(stretch), 0);
      raw::fill(part.counts(stretch), 0);
    }
  }
}

}  // namespace tessera::optim
