#include "runtime/shard/unit.hpp"

#include <algorithm>

#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/base/log.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::shard {
namespace {

// Routes the gradients of a unit's trainable parameters into its gradient buffer.
class UnitSinks final : public GradientSinks {
 public:
  explicit UnitSinks(Unit& unit) : unit_(unit) {}
  autograd::GradientSink sink(int entry) override { return unit_.sink(entry); }

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

// Queued collectives may still read what was prepared for them.
Unit::~Unit() {
  close_unchecked();
  drop_run();
  for (auto& prepared : prepared_) device_.context().keep(std::move(prepared));
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
  DeviceContext& device = options_.mesh.world().device().context();
  gather_name_ = device.intern("all_gather " + name_);
  reduce_name_ = device.intern("reduce_scatter " + name_);
  keeps_open_ = options_.reshard_after_forward == Reshard::never ||
                (is_root && options_.reshard_after_forward == Reshard::automatic);
  for (const auto& group : {trainable_, frozen_})
    if (group) group->name = name_;
}

void Unit::leave() noexcept {
  reset();
  set_rings(nullptr, nullptr);
  context_ = nullptr;
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
    p.window_offset_bytes = 0;  // not what it was in a module that had memory before
  }
  if (trainable_ && size() == 1) {
    local_ = std::make_shared<LocalGradient>(*trainable_);
    local_->completed_by_caller = true;
  }
  if (trainable_) {
    const auto sinks = std::make_shared<UnitSinks>(*this);
    for (const auto& p : parameters_)
      if (p->trainable) p->sinks = sinks;
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
  if (!found) found = prepared_.emplace_back(std::make_shared<Prepared>()).get();
  found->group.name = name;
  found->group.items.clear();
  found->stream = stream;
  found->tick =
      device_.context().clock(stream)[stream] + 1;  // the launch that the caller makes next
  return found->group;
}

void Unit::pack(const FlatGroup& group, const Tensor& table) {
  const Stream stream = device_.gather();
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
  TESSERA_EXPECT(!trainable_ || trainable_->whole, "unit '", name_,
                 "': an update of its parameters was left half done by a step that failed; load "
                 "parameters and optimizer state on every rank before the next step");
  // First, because it often covers the slot's last use as well.
  if (needs_slot())
    for (const auto& group : {trainable_, frozen_})
      if (group) device_.gather().wait(group->updated);
  if (needs_slot() && layout_.gather_bytes > 0)
    slot_ = gather_ring_->take(layout_.gather_bytes, StreamId::gather);
  advance(UnitState::closed, UnitState::gathering);
  gathered_version_ = version();
  if (!needs_slot() || layout_.gather_bytes == 0) return;
  try {
    fill_slot();
  } catch (...) {
    close_unchecked();
    throw;
  }
}

void Unit::fill_slot() {
  if (trainable_) pack(*trainable_, pack_trainable_);
  if (frozen_) pack(*frozen_, pack_frozen_);
  if (size() > 1) {
    CollectiveGroup& group = prepare(gather_name_, StreamId::gather);
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
  const bool was_gathered = needs_slot() && layout_.gather_bytes > 0;
  // In forward the first use of a parameter waits: for the root that is after its inner units, and
  // their waits cover it. In backward nodes read what they have saved.
  if (was_gathered && autograd::in_backward()) device_.compute().wait(gathered_);
  advance(UnitState::gathering, UnitState::open);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterState& p = *parameters_[i];
    p.ready = was_gathered ? &gathered_ : nullptr;
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
}

// Names the parameter that somebody outside still holds, empty for none.
std::string Unit::escape() const {
  for (const auto& p : parameters_) {
    const long others = p->window.use_count() - 1 - p->window->saved;
    if (others > 0)
      return concat("unit '", name_, "' closes while parameter '", p->name,
                    "' is still referenced outside its call (last used by '", p->window->last_op,
                    "'); copy what leaves the module, or keep using it inside");
  }
  return {};
}

void Unit::give_back(SlotRing& ring, const Slot& slot) noexcept {
  try {
    ring.give_back(slot);
  } catch (const std::exception& error) {
    log(LogLevel::error,
        concat("unit '", name_, "': could not give its slot back: ", error.what()));
  }
}

void Unit::close_unchecked() noexcept {
  if (state_ == UnitState::closed) return;
  for (const auto& p : parameters_) {
    p->window->data = nullptr;
    p->window->use = nullptr;
    p->ready = nullptr;
  }
  if (needs_slot() && layout_.gather_bytes > 0) {
    // The slot's memory is made safe by its last use, not by what the unit knows: a gather that
    // nobody waited for counts too.
    give_back(*gather_ring_, slot_);
  }
  slot_ = {};
  state_ = UnitState::closed;
}

void Unit::close() {
  const std::string escaped = state_ == UnitState::open ? escape() : "";
  close_unchecked();
  TESSERA_EXPECT(escaped.empty(), escaped);
}

// --- the module's call ---

// What tags the nodes of a call for training; in backward the one that its first run has kept.
std::shared_ptr<UnitRegion> Unit::make_region() {
  auto* const recomputed = autograd::RecomputedRegions::current();
  const bool first_run = recomputed && recomputed->is_first_run();
  if (!first_run && !autograd::grad_enabled()) return nullptr;
  const auto* outer = dynamic_cast<UnitRegion*>(autograd::current_region().get());
  if (outer && outer->unit().context_ != context_) outer = nullptr;
  std::shared_ptr<UnitRegion> region;
  if (recomputed && autograd::in_backward())
    region = std::dynamic_pointer_cast<UnitRegion>(recomputed->take([&](autograd::Region& kept) {
      const auto* mine = dynamic_cast<UnitRegion*>(&kept);
      return mine && &mine->unit() == this;
    }));
  if (region)
    region->comes_again(outer);
  else
    region = std::make_shared<UnitRegion>(shared_from_this(), outer, first_run);
  if (first_run) recomputed->keep(region);
  return region;
}

void Unit::before_call(nn::Module& module) {
  if (!context_) Context::build(module);
  TESSERA_EXPECT(context_->is_current(), "unit '", name_,
                 "': its world has recovered from a failure without it; give reset a module that "
                 "holds all roots of the world");
  if (scope_depth_ > 0) {
    ++scope_depth_;  // the module calls itself
    return;
  }
  std::shared_ptr<UnitRegion> region = make_region();
  if (region && autograd::in_backward()) {
    context_->begins(*region);
  } else {
    if (is_stale() && !autograd::in_backward()) close();
    gather();
    open();
  }
  if (region) guard_.emplace(region);
  region_ = std::move(region);
  ++scope_depth_;
}

void Unit::after_call(nn::Module&) {
  if (--scope_depth_ > 0) return;
  guard_.reset();
  const auto region = std::exchange(region_, nullptr);
  const auto* const recomputed = autograd::RecomputedRegions::current();
  const bool has_nodes_later = recomputed && recomputed->is_first_run();
  const bool is_empty = !region || (region->nodes() == 0 && !has_nodes_later);
  if (autograd::in_backward()) {  // recomputed: open until the region ends
    if (region && is_empty) region->rests();
    if (is_empty && running_ == 0) close();
    return;
  }
  if (!is_empty && !is_root_) context_->called(region->call());
  if (!keeps_open_ || !region) close();
}

void Unit::abandon_call(nn::Module&) noexcept {
  if (--scope_depth_ > 0) return;
  guard_.reset();
  region_.reset();
  close_unchecked();
}

// --- backward ---

UnitRegion::UnitRegion(std::shared_ptr<Unit> unit, const UnitRegion* outer, bool recomputed)
    : unit_(std::move(unit)),
      forward_(outer ? outer->forward_ : std::make_shared<Forward>()),
      call_(std::make_shared<Call>()),
      recomputed_(recomputed) {
  forward_->epoch = unit_->context_->device().recoveries();
  call_->unit = unit_;
  call_->forward = forward_;
  call_->outer = outer ? outer->call_ : nullptr;
  call_->ends_first = outer && (recomputed || outer->nodes() > 0);
  forward_->opened.push_back(unit_);
}

// What is recomputed runs inside of a node of the region around all of it.
void UnitRegion::comes_again(const UnitRegion* outer) noexcept {
  call_->ends_first = outer && (!outer->recomputed_ || outer->nodes() > 0);
}

void UnitRegion::backward_begins() {
  unit_->expect_epoch(forward_->epoch);
  unit_->context_->begins(*this);
}

void UnitRegion::backward_ends() {
  unit_->context_->ends(*this);
  rests();
  unit_->close();
  unit_->reduce();
}

void Unit::abandon_backward() noexcept {
  const bool was_touched = owes_reduction_ || (context_ && reduced_in_ == context_->pass());
  if (trainable_ && was_touched) trainable_->gradient = {};
  if (local_) local_->abandon();
  running_ = 0;
  owes_reduction_ = false;
  close_unchecked();
  drop_run();
}

void Unit::reset() noexcept {
  abandon_backward();
  if (trainable_) trainable_->gradient = {};
  region_ = nullptr;
}

void Unit::expect_epoch(std::uint64_t epoch) const {
  TESSERA_EXPECT(context_ && epoch == context_->device().recoveries(),
                 "backward: the graph of unit '", name_,
                 "' belongs to a step that failed and was reset; run forward again");
}

void Unit::set_whole(bool is_whole) noexcept {
  if (trainable_) trainable_->whole = is_whole;
}

void Unit::drop_run() noexcept {
  if (!run_) return;
  run_.reset();
  give_back(*reduce_ring_, run_slot_);
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
