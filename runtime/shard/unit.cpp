#include "runtime/shard/unit.hpp"

#include <algorithm>

#include "runtime/tensor/launch.hpp"
#include "tessera/base/log.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::shard {
namespace {

// Routes the gradients of a unit's trainable parameters into its run.
class UnitPlace final : public GradientPlace {
 public:
  explicit UnitPlace(Unit& unit) : unit_(unit) {}
  autograd::Leaf::Target take(int entry) override { return unit_.take(entry); }

 private:
  Unit& unit_;
};

Tensor table_of(const std::vector<std::int64_t>& rows, const Device& device) {
  const OwnerGuard owner(device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(rows.size()) / 3, 3}, device);
}

Access write_access(const Slot& slot) {
  return {slot.use, slot.data, slot.data + slot.bytes, AccessMode::write};
}

}  // namespace

Unit::Unit(std::vector<std::shared_ptr<ParameterState>> parameters, const ShardOptions& options)
    : options_(options), parameters_(std::move(parameters)) {
  std::vector<ShardSpec> specs;
  std::vector<bool> trainable;
  for (const auto& p : parameters_) {
    p->unit = &name_;
    p->spec = {p->shape, options.mesh.shard_size(), options.mesh.shard_rank()};
    p->compute_dtype = param_dtype();
    specs.push_back(p->spec);
    trainable.push_back(p->trainable);
  }
  layout_ = UnitLayout::make(specs, trainable, param_dtype(), reduce_dtype());
}

void Unit::advance(UnitState from, UnitState to) {
  TESSERA_EXPECT(state_ == from, "unit '", name_, "' is ", shard::name(state_), "; ",
                 shard::name(to), " is reached from ", shard::name(from), " only");
  state_ = to;
}

void Unit::join(std::shared_ptr<Context> context, std::string name, bool is_root) {
  context_ = std::move(context);
  name_ = std::move(name);
  is_root_ = is_root;
  keeps_open_ = options_.reshard_after_forward == Reshard::never ||
                (is_root && options_.reshard_after_forward == Reshard::automatic);
  for (const auto& group : {trainable_, frozen_})
    if (group) group->name = name_;
}

// --- memory ---

void Unit::materialize(const Device& device) {
  TESSERA_EXPECT(!is_materialized(), "materialize: unit '", name_, "' already has memory");
  device_ = device;
  for (const bool trainable : {true, false}) {
    std::vector<std::shared_ptr<ParameterState>> states;
    std::copy_if(parameters_.begin(), parameters_.end(), std::back_inserter(states),
                 [&](const auto& p) { return p->trainable == trainable; });
    if (states.empty()) continue;
    auto& group = trainable ? trainable_ : frozen_;
    group = FlatGroup::make(name_, states, device);
    if (size() > 1) group->sums = &options_.mesh.world().control();
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterState& p = *parameters_[i];
    const auto bytes = p.shape.numel() * static_cast<std::int64_t>(size_bytes(param_dtype()));
    p.window =
        std::make_shared<Storage>(Storage{device, {}, nullptr, bytes, nullptr, 0, "", &name_});
  }
  if (trainable_ && size() == 1) {
    local_ = std::make_shared<LocalGradient>(*trainable_);
    local_->completed_by_caller = true;
  }
  if (trainable_) {
    const auto place = std::make_shared<UnitPlace>(*this);
    for (const auto& p : parameters_)
      if (p->trainable) p->place = place;
    arrived_.assign((trainable_->entries.size() + 63) / 64, 0);
    held_.assign(trainable_->entries.size(), false);
  }
  make_tables();
}

void Unit::make_tables() {
  std::vector<std::int64_t> pack[2], places, gaps_f32, gaps_reduce;
  const auto element = static_cast<std::int64_t>(size_bytes(param_dtype()));
  const auto wire = static_cast<std::int64_t>(size_bytes(reduce_dtype()));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterState& p = *parameters_[i];
    const FlatGroup& group = *p.group;
    const auto at = static_cast<std::size_t>(p.entry);
    const FlatEntry& entry = group.entries[at];
    const std::int64_t own_chunk = p.spec.rank * entry.chunk * element;
    const auto rows = {entry.offset, layout_.gather_offset_bytes[i] + own_chunk, entry.chunk};
    pack[p.trainable ? 0 : 1].insert(pack[p.trainable ? 0 : 1].end(), rows);
    if (!p.trainable) continue;
    places.insert(places.end(), {layout_.run_offset_bytes[i], p.shape.numel() * wire,
                                 p.spec.padded_numel() * wire});
    const std::int64_t end =
        at + 1 < group.entries.size() ? group.entries[at + 1].offset : group.numel;
    gaps_f32.insert(gaps_f32.end(), {entry.offset * 4, entry.chunk * 4, (end - entry.offset) * 4});
    gaps_reduce.insert(gaps_reduce.end(),
                       {entry.offset * wire, entry.chunk * wire, (end - entry.offset) * wire});
  }
  if (needs_slot()) {
    if (trainable_) pack_trainable_ = table_of(pack[0], device_);
    if (frozen_) pack_frozen_ = table_of(pack[1], device_);
  }
  if (!trainable_ || size() == 1) return;
  run_places_ = table_of(places, device_);
  gaps_f32_ = table_of(gaps_f32, device_);
  gaps_reduce_ = wire == 4 ? gaps_f32_ : table_of(gaps_reduce, device_);
}

// --- gather, open, close ---

std::uint64_t Unit::version() const noexcept {
  return (trainable_ ? trainable_->version : 0) + (frozen_ ? frozen_->version : 0);
}
bool Unit::is_stale() const noexcept { return needs_slot() && gathered_version_ != version(); }

CollectiveGroup& Unit::prepare(const char* name, StreamId stream) {
  const Clock& host = device_.context().host_clock();
  Prepared* found = nullptr;
  for (const auto& p : prepared_)
    if (p->tick <= host[p->stream]) found = p.get();
  if (!found) found = prepared_.emplace_back(std::make_unique<Prepared>()).get();
  found->group.name = name;
  found->group.items.clear();
  found->stream = stream;
  found->tick =
      device_.context().clock(stream)[stream] + 1;  // the launch that the caller makes next
  return found->group;
}

void Unit::pack(const FlatGroup& group, const Tensor& table) {
  const Stream stream = device_.gather();
  stream.wait(group.updated);
  const kernels::PackArgs args{slot_.data, reinterpret_cast<const float*>(group.values.data()),
                               reinterpret_cast<const kernels::PackEntry*>(table.data()),
                               static_cast<std::int32_t>(group.entries.size()), param_dtype()};
  const Access accesses[] = {group.values.access(AccessMode::read), table.access(AccessMode::read),
                             write_access(slot_)};
  const auto bytes =
      static_cast<double>(group.numel) * (4.0 + static_cast<double>(size_bytes(param_dtype())));
  stream.launch({.name = "pack_shard", .cost = {.bytes = bytes}, .accesses = accesses},
                kernels::Call<kernels::PackArgs>{detail::table(device_).flat.pack, args});
}

void Unit::gather() {
  if (state_ != UnitState::closed) return;
  advance(UnitState::closed, UnitState::gathering);
  gathered_version_ = version();
  if (!needs_slot() || layout_.gather_bytes == 0) return;
  slot_ = gather_ring_->take(layout_.gather_bytes, StreamId::gather);
  if (trainable_) pack(*trainable_, pack_trainable_);
  if (frozen_) pack(*frozen_, pack_frozen_);
  if (size() > 1) {
    CollectiveGroup& group = prepare("all_gather_unit", StreamId::gather);
    const auto element = static_cast<std::int64_t>(size_bytes(param_dtype()));
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const ShardSpec& spec = parameters_[i]->spec;
      std::byte* const whole = slot_.data + layout_.gather_offset_bytes[i];
      group.items.push_back({.send = whole + spec.rank * spec.chunk_numel() * element,
                             .recv = whole,
                             .count = spec.chunk_numel(),
                             .kind = CollectiveKind::all_gather,
                             .dtype = param_dtype()});
    }
    const Access accesses[] = {write_access(slot_)};
    options_.mesh.world().gather().submit(group, accesses);
    ++context_->counters.gathers;
  }
  gathered_ = device_.gather().record();
}

void Unit::open() {
  if (state_ == UnitState::open) return;
  advance(UnitState::gathering, UnitState::open);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterState& p = *parameters_[i];
    if (needs_slot()) {
      p.window->data = slot_.data + layout_.gather_offset_bytes[i];
      p.window->use = slot_.use;
    } else {
      const FlatGroup& group = *p.group;
      p.window->data =
          group.values.data() + group.entries[static_cast<std::size_t>(p.entry)].offset * 4;
      p.window->use = group.values.storage()->use;
    }
  }
  if (needs_slot() && layout_.gather_bytes > 0) device_.compute().wait(gathered_);
}

void Unit::check_escapes() const {
  for (const auto& p : parameters_) {
    const long others = p->window.use_count() - 1 - p->window->saved;
    TESSERA_EXPECT(others <= 0, "unit '", name_, "' closes while parameter '", p->name,
                   "' is still referenced outside its call (last used by '", p->window->last_op,
                   "'); copy what leaves the module, or keep using it inside");
  }
}

void Unit::close_unchecked() noexcept {
  if (state_ == UnitState::closed) return;
  for (const auto& p : parameters_) {
    p->window->data = nullptr;
    p->window->use = nullptr;
  }
  if (needs_slot() && layout_.gather_bytes > 0) {
    // The slot's memory is made safe by its last use, not by what the unit knows: a gather that
    // nobody waited for counts too.
    try {
      gather_ring_->give_back(slot_);
    } catch (const std::exception& error) {
      log(LogLevel::error,
          concat("unit '", name_, "': could not give its slot back: ", error.what()));
    }
  }
  slot_ = {};
  state_ = UnitState::closed;
}

void Unit::close() {
  if (state_ == UnitState::open) check_escapes();
  close_unchecked();
}

// --- the module's call ---

void Unit::before_call(nn::Module& module) {
  if (!context_) Context::build(module);
  if (scope_depth_++ > 0) return;  // the module calls itself
  if (state_ == UnitState::open && is_stale() && !autograd::in_backward()) close();
  gather();
  open();
  if (!autograd::grad_enabled()) return;
  auto region = std::make_shared<UnitRegion>(shared_from_this());
  if (!autograd::in_backward()) {
    owes_reduction_ = owes_reduction_ || trainable_ != nullptr;
    if (!is_root_) context_->called(region);
  }
  guard_.emplace(std::move(region));
}

void Unit::after_call(nn::Module&) {
  if (--scope_depth_ > 0) return;
  guard_.reset();
  if (autograd::in_backward()) return;  // recomputed: open until the region ends
  if (!keeps_open_ || !autograd::grad_enabled()) close();
}

void Unit::abandon_call(nn::Module&) noexcept {
  if (--scope_depth_ > 0) return;
  guard_.reset();
  close_unchecked();
}

// --- backward ---

void UnitRegion::backward_begins() {
  begun_ = true;
  if (const Context* const context = unit_->context()) const_cast<Context*>(context)->begins(*this);
  unit_->gather();
  unit_->open();
}

void UnitRegion::backward_ends() {
  unit_->close();
  unit_->reduce();
}

void Unit::take_run() {
  run_slot_ = reduce_ring_->take(layout_.run_bytes, StreamId::compute);
  run_ = std::make_shared<Storage>(
      Storage{device_, {}, run_slot_.data, run_slot_.bytes, run_slot_.use, 0, "", nullptr});
  std::fill(held_.begin(), held_.end(), false);
  std::fill(arrived_.begin(), arrived_.end(), 0);
}

autograd::Leaf::Target Unit::take(int entry) {
  context_->schedule_end();
  owes_reduction_ = true;
  if (local_) return local_->take(entry);
  if (!run_) take_run();
  const auto at = static_cast<std::size_t>(entry);
  const std::shared_ptr<ParameterState> p = trainable_->entries[at].parameter.lock();
  const auto i = static_cast<std::size_t>(std::find(parameters_.begin(), parameters_.end(), p) -
                                          parameters_.begin());
  arrived_[at / 64] |= std::uint64_t{1} << (at % 64);
  const bool accumulate = held_[at];
  held_[at] = true;
  return {Tensor::wrap(run_, p->shape, reduce_dtype(), layout_.run_offset_bytes[i]), 1.0 / size(),
          accumulate};
}

void Unit::complete_run() {
  const Tensor run = Tensor::wrap(
      run_, {run_->bytes / static_cast<std::int64_t>(size_bytes(reduce_dtype()))}, reduce_dtype());
  for (std::size_t word = 0; word < arrived_.size(); ++word) {
    kernels::CompleteArgs args{};
    args.base = run_->data;
    args.entries = reinterpret_cast<const kernels::PlaceEntry*>(run_places_.data());
    args.counts = run_->data + layout_.counts_offset_bytes;
    args.counts_stride_bytes = layout_.counts_chunk_bytes;
    args.arrived = arrived_[word];
    args.first = static_cast<std::int32_t>(word * 64);
    args.entry_count = static_cast<std::int32_t>(trainable_->entries.size());
    args.copies = size();
    args.dtype = reduce_dtype();
    args.zero_missing = true;
    detail::launch("complete_run", device_, detail::table(device_).flat.complete, args,
                   {detail::reads(run_places_), detail::writes(run)});
  }
}

// Zeroes the alignment gaps between the entries of a flat array, so that sums over all of it are
// sums over the entries.
void Unit::clear_gaps(Stream stream, const Tensor& flat, const Tensor& table) {
  kernels::CompleteArgs args{};
  args.base = flat.data();
  args.entries = reinterpret_cast<const kernels::PlaceEntry*>(table.data());
  args.arrived = ~std::uint64_t{0};
  args.entry_count = static_cast<std::int32_t>(trainable_->entries.size());
  args.dtype = reduce_dtype();
  const Access accesses[] = {table.access(AccessMode::read), flat.access(AccessMode::write)};
  for (args.first = 0; args.first < args.entry_count; args.first += 64)
    stream.launch({.name = "clear_gaps", .accesses = accesses},
                  kernels::Call<kernels::CompleteArgs>{detail::table(device_).flat.complete, args});
}

Tensor Unit::fresh_gradient() {
  const OwnerGuard owner(device_, "gradients");
  Tensor gradient = Tensor::empty({trainable_->numel + trainable_->counts_numel()}, f32, device_);
  clear_gaps(device_.compute(), gradient, gaps_f32_);
  return gradient;
}

// compute  ... last gradient │ complete ┐ record
// reduce                                └ wait │ reduce_scatter │ (add) │ record
//
// The end of backward waits for that record.
void Unit::reduce() {
  owes_reduction_ = false;
  if (!trainable_) return;
  if (local_) return local_->complete();
  if (!run_) take_run();  // nothing arrived here: zeros travel
  complete_run();
  const bool fresh = !trainable_->gradient.defined();
  if (fresh) trainable_->gradient = fresh_gradient();
  const Stream reduce = device_.reduce();
  reduce.wait(device_.compute().record());

  const DType wire = reduce_dtype();
  const auto element = static_cast<std::int64_t>(size_bytes(wire));
  const bool direct = fresh && wire == f32;
  Tensor target = trainable_->gradient;
  if (!direct) {  // one shard-sized staging, on the reduce stream's own memory
    auto storage = std::make_shared<Storage>(
        Storage{device_, {}, nullptr, target.numel() * element, nullptr, 0, "", nullptr});
    const OwnerGuard owner(device_, "staging");
    storage->buffer = Memory::of(device_).allocate(storage->bytes, StreamId::reduce);
    storage->data = storage->buffer.data();
    storage->use = &storage->buffer.use();
    target = Tensor::wrap(std::move(storage), target.shape(), wire);
    clear_gaps(reduce, target, gaps_reduce_);
  }
  CollectiveGroup& group = prepare("reduce_scatter_unit", StreamId::reduce);
  for (const FlatEntry& entry : trainable_->entries) {
    const auto i = static_cast<std::size_t>(
        std::find(parameters_.begin(), parameters_.end(), entry.parameter.lock()) -
        parameters_.begin());
    group.items.push_back({.send = run_->data + layout_.run_offset_bytes[i],
                           .recv = target.data() + entry.offset * element,
                           .count = entry.chunk,
                           .kind = CollectiveKind::reduce_scatter,
                           .dtype = wire});
  }
  group.items.push_back({.send = run_->data + layout_.counts_offset_bytes,
                         .recv = target.data() + trainable_->numel * element,
                         .count = trainable_->counts_numel(),
                         .kind = CollectiveKind::reduce_scatter,
                         .dtype = wire});
  const Access accesses[] = {{run_->use, run_->data, run_->data + run_->bytes, AccessMode::read},
                             target.access(AccessMode::write)};
  options_.mesh.world().reduce().submit(group, accesses);
  ++context_->counters.reductions;
  if (!direct) {
    kernels::AxpbyArgs args{};
    args.y = trainable_->gradient.data();
    args.x = target.data();
    args.alpha = 1;
    args.beta = fresh ? 0 : 1;
    args.count = target.numel();
    args.y_dtype = f32;
    args.x_dtype = wire;
    const Access add[] = {target.access(AccessMode::read),
                          trainable_->gradient.access(AccessMode::write)};
    reduce.launch(
        {.name = "accumulate_shard", .accesses = add},
        kernels::Call<kernels::AxpbyArgs>{detail::table(device_).elementwise.axpby, args});
  }
  run_.reset();
  reduce_ring_->give_back(run_slot_);
  context_->reduced(reduce.record());
}

ShardPlan::Unit Unit::describe() const {
  ShardPlan::Unit out;
  out.name = name_;
  out.parameters = static_cast<std::int64_t>(parameters_.size());
  for (const auto& p : parameters_) {
    out.numel += p->shape.numel();
    out.shard_numel += round_up(p->spec.chunk_numel(), kFlatAlign);
  }
  out.gather_bytes = needs_slot() ? layout_.gather_bytes : 0;
  out.run_bytes = size() > 1 ? layout_.run_bytes : 0;
  out.param = param_dtype();
  out.reduce = reduce_dtype();
  out.reshard_after_forward = !keeps_open_;
  if (size() > 1 && !parameters_.empty()) out.gathers_per_call = keeps_open_ ? 1 : 2;
  if (size() > 1 && layout_.run_bytes > 0) out.reductions_per_call = 1;
  return out;
}

}  // namespace tessera::shard
