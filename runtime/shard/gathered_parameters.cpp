#include "runtime/shard/gathered_parameters.hpp"

#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/shard/host_shards.hpp"
#include "runtime/shard/packed_parameters.hpp"
#include "runtime/shard/post_forward_shards.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

const char* GatheredParameters::name(State state) noexcept {
  return state == State::closed ? "closed" : state == State::gathering ? "gathering" : "open";
}

void GatheredParameters::advance(State from, State to) {
  TESSERA_EXPECT(state_ == from, "unit '", shards_.name(), "' is ", name(state_), "; ", name(to),
                 " is reached from ", name(from), " only");
  state_ = to;
}

void GatheredParameters::materialize() {
  full_.reserve(shards_.parameters().size());
  for (std::size_t i = 0; i < shards_.parameters().size(); ++i) {
    ParameterState& p = *shards_.parameters()[i];
    const auto element = static_cast<std::int64_t>(size_bytes(p.compute_dtype));
    p.window = Storage::window(shards_.device(), p.shape.numel() * element, shards_.name());
    p.window_offset_bytes = 0;  // not what it was in a module that had memory before
    full_.push_back(with_history(shards_.parameters()[i]));
    p.full = &full_[i];
    if (!p.transform && !shards_.layout().packed.place_of(i))
      add_parts(p, shards_.layout().gather_offset_bytes[i]);
  }
  if (!shards_.needs_slot()) return;
  if (!shards_.layout().packed.is_empty())
    put_stage<GatherStage>(stages_, std::make_unique<PackedParameters>(shards_, parts_));
  if (shards_.is_encoded())
    put_stage<GatherStage>(stages_, std::make_unique<EncodedParameters>(shards_, parts_));
  make_copies();
}

// Even chunks in one item, ragged ones in one for each rank that has any.
void GatheredParameters::add_parts(const ParameterState& p, std::int64_t offset_bytes) {
  if (!p.spec.is_ragged())
    return void(parts_.push_back({offset_bytes, p.spec.chunk_numel(), p.compute_dtype}));
  const std::int64_t row = p.spec.row_numel(),
                     row_bytes = row * static_cast<std::int64_t>(size_bytes(p.compute_dtype));
  for (int r = 0; r < p.spec.world; ++r)
    if (const RowRange rows = p.spec.owned(r); rows.size() > 0)
      parts_.push_back(
          {offset_bytes + rows.begin * row_bytes, rows.size() * row, p.compute_dtype, r});
}

// A gather waits for `updated` and no more, so that the tables come before it, too; where shards
// lie on the host, for a part of HostLink's, which is free behind the table. It writes no values:
// where they are not consistent, slices that are made anew leave them so.
void GatheredParameters::make_copies() {
  std::unique_ptr<HostShards> host;
  if (shards_.is_offloaded()) host = std::make_unique<HostShards>(shards_);
  for (const auto& group : shards_.groups()) {
    if (host) {
      host->add(*group);
    } else {
      read_here_.push_back(group.get());
      for (ShardCopy& copy : shard_copies(shards_, *group, shards_.values(*group), 0))
        copies_.push_back(std::move(copy));
    }
    group->updated = group->device.compute().record();
  }
  if (host) put_stage<GatherStage>(stages_, std::move(host));
}

std::uint64_t GatheredParameters::version() const noexcept {
  std::uint64_t writes = 0;
  for (const auto& group : shards_.groups()) writes += group->version;
  return writes;
}
bool GatheredParameters::is_stale() const noexcept {
  return shards_.needs_slot() && gathered_version_ != version();
}

// --- gather ---

bool GatheredParameters::gather(const char* name) {
  if (shards_.device().context().is_capturing()) note_open();
  if (state_ == State::gathering && is_stale()) close();  // nobody has opened it since an update
  if (state_ != State::closed) return false;
  TESSERA_EXPECT(!shards_.group() || shards_.group()->is_consistent, "unit '", shards_.name(),
                 "': a step that failed left an update of its parameters half done; load "
                 "parameters and optimizer state on every rank before the next step");
  // First, because it often covers the slot's last use as well.
  for (const FlatGroup* const group : read_here_) shards_.device().gather().wait(group->updated);
  if (uses_slot()) slot_ = shards_.take(SlotKind::parameters, shards_.gather_bytes());
  advance(State::closed, State::gathering);
  gathered_version_ = version();
  if (!uses_slot()) return false;
  try {
    slot_.arena->begin_use(slot_, StreamId::gather);
    return fill_slot(name);
  } catch (...) {
    close_unchecked();
    throw;
  }
}

// A captured step that finds it open gathers nothing, and is one of the values that are there.
void GatheredParameters::note_open() {
  const auto is_due = [this] { return state_ == State::closed || is_stale(); };
  if (StepMemory* const step = StepMemory::of(shards_.device()))
    step->depends_on(this, is_due(), is_due);
}

// Each parameter's own chunk is packed at its offset in the slot, so the all-gather is in place.
bool GatheredParameters::fill_slot(const char* name) {
  const Stream gather = shards_.device().gather();
  for (const auto& stage : stages_)
    if (stage->fill(slot_, gathered_version_)) {
      gathered_ = gather.record();
      return true;
    }
  for (const ShardCopy& copy : copies_)
    pack("pack_shard", gather, copy.table, copy.numel, copy.group->values, slot_, copy.dtype);
  for (const auto& stage : stages_) stage->pack(slot_);
  if (shards_.size() > 1) {
    CollectiveGroup& group = prepared_.next(name);
    shards_.tell_progress_of_gather(group);
    if (group.items().empty())
      for (const GatheredPart& part : parts_) group.edit().push_back(item_of(part));
    const Collective first = item_of(parts_.front());
    group.place(first.send, first.recv);
    const Access accesses[] = {slot_.access(AccessMode::write)};
    shards_.options().mesh.shard_group().gather().submit(group, accesses);
  }
  for (const auto& stage : stages_) stage->unpack(slot_);
  gathered_ = gather.record();
  return shards_.size() > 1;
}

Collective GatheredParameters::item_of(const GatheredPart& part) const {
  std::byte* const at = slot_.data + part.offset_bytes;
  Collective item{.send = at,
                  .recv = at,
                  .count = part.count,
                  .kind = CollectiveKind::broadcast,
                  .dtype = part.dtype,
                  .root = part.root};
  if (part.root >= 0) return item;
  item.send = at + shards_.options().mesh.shard_rank() * part.count *
                       static_cast<std::int64_t>(size_bytes(part.dtype));
  item.kind = CollectiveKind::all_gather;
  item.root = 0;
  return item;
}

// --- open, close ---

void GatheredParameters::open() {
  // In forward the wait is lazy: Parameter::value waits at a parameter's first use. The root uses
  // its parameters after its inner units, whose waits cover the root's gather, so it seldom waits
  // at all. In backward nobody calls value(): nodes read saved tensors. So the wait stands here,
  // also for what a program has unsharded and not read.
  if (uses_slot() && autograd::in_backward()) shards_.device().compute().wait(gathered_);
  const bool was_open = state_ == State::open, needs_slot = shards_.needs_slot();
  if (!was_open) advance(State::gathering, State::open);
  const Event* const ready = uses_slot() ? &gathered_ : nullptr;
  for (std::size_t i = 0; i < full_.size(); ++i) {
    ParameterState& p = *shards_.parameters()[i];
    Storage& window = *p.window;
    // Also where it has stayed open: what it kept from before an update is an error to use.
    window.version = p.group->version;
    if (was_open) continue;
    p.ready = ready;
    if (needs_slot) {
      window.data = slot_.data + shards_.layout().gather_offset_bytes[i];
      window.use = slot_.use;
    } else {
      const Tensor& values = p.group->values;
      window.data = values.data() + shards_.offset_of(i) * p.element_bytes();
      window.use = values.storage()->use;
    }
  }
}

// Nobody may have waited for the gather. Whoever writes the shards next comes after it even so.
void GatheredParameters::close(bool ends_forward) {
  shards_.device().context().submit_held();  // it reads the views
  const std::string escaped = state_ == State::open ? escaped_parameter() : "";
  if (ends_forward && slot_.arena && escaped.empty() && shards_.slots()->stays(slot_)) {
    shut_windows();
    return advance(State::open, State::gathering);
  }
  if (state_ != State::closed && uses_slot()) shards_.device().compute().wait(gathered_);
  close_unchecked(ends_forward);
  TESSERA_EXPECT(escaped.empty(), escaped);
}

void GatheredParameters::shut_windows() noexcept {
  for (const auto& p : shards_.parameters()) {
    p->window->data = nullptr;
    p->window->use = nullptr;
    p->ready = nullptr;
  }
}

void GatheredParameters::close_unchecked(bool ends_forward) noexcept {
  if (state_ == State::closed) return;
  shut_windows();
  // The slot's memory is made safe by its last use, not by what is known here: a gather that nobody
  // waited for counts too.
  if (slot_.arena) shards_.give_back(slot_, ends_forward);
  slot_ = {};
  state_ = State::closed;
}

std::string GatheredParameters::escaped_parameter() const {
  for (std::size_t i = 0; i < full_.size(); ++i) {
    const std::shared_ptr<Storage>& window = full_[i].storage();
    const long views = window.use_count() - 2 - window->saved;  // without `full_` and its parameter
    if (views > 0 || full_[i].handles() > 1)
      return concat("unit '", shards_.name(), "' closes while parameter '",
                    shards_.parameters()[i]->name, "' is still referenced outside its call",
                    *window->last_op ? concat(" (last used by '", window->last_op, "')") : "",
                    "; copy what leaves the module, and let a custom operation hold it in an "
                    "autograd::Saved");
  }
  return {};
}

// --- Reshard::to ---

void GatheredParameters::keep_over(const RankGroup* neighbours) {
  if (!kept_ && !neighbours) return;
  std::unique_ptr<PostForwardShards> kept;
  if (neighbours) kept = std::make_unique<PostForwardShards>(shards_, *neighbours);
  kept_ = kept.get();
  remove_stage(stages_, GatherStage::Place::neighbours);
  if (kept) put_stage<GatherStage>(stages_, std::move(kept));
}

void GatheredParameters::keep_part() {
  if (state_ != State::open || !uses_slot()) return;
  for (const auto& stage : stages_) stage->keep(slot_, gathered_version_);
}

void GatheredParameters::drop_part() noexcept {
  for (const auto& stage : stages_) stage->drop();
}

}  // namespace tessera::shard
