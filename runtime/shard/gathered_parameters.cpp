#include "runtime/shard/gathered_parameters.hpp"

#include "runtime/shard/host_link.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

const char* GatheredParameters::name(State state) noexcept {
  return state == State::closed ? "closed" : state == State::gathering ? "gathering" : "open";
}

void GatheredParameters::advance(State from, State to) {
  TESSERA_EXPECT(state_ == from, "unit '", shards_.name, "' is ", name(state_), "; ", name(to),
                 " is reached from ", name(from), " only");
  state_ = to;
}

void GatheredParameters::materialize() {
  full_.reserve(shards_.parameters.size());
  for (std::size_t i = 0; i < shards_.parameters.size(); ++i) {
    ParameterState& p = *shards_.parameters[i];
    const auto element = static_cast<std::int64_t>(size_bytes(p.compute_dtype));
    p.window = Storage::window(shards_.device, p.shape.numel() * element, shards_.name);
    p.window_offset_bytes = 0;  // not what it was in a module that had memory before
    full_.push_back(with_history(shards_.parameters[i]));
    p.full = &full_[i];
    if (!p.transform && !shards_.layout.packed.place_of(i))
      add_parts(p, shards_.layout.gather_offset_bytes[i]);
  }
  if (!shards_.needs_slot()) return;
  if (const PackedLayout& packed = shards_.layout.packed; !packed.is_empty()) {
    packed_ = std::make_unique<PackedChunks>(shards_);
    parts_.push_back({packed.offset_bytes, packed.numel, shards_.param_dtype()});
  }
  if (shards_.is_encoded) encoded_ = std::make_unique<EncodedParameters>(shards_, parts_);
  for (const auto& group : shards_.groups) make_sources(*group);
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

void GatheredParameters::make_sources(FlatGroup& group) {
  for (const auto& range : plain_values(shards_, group)) make_source(group, range);
  // A gather waits for `updated` and no more, so that the table comes before it, too; where shards
  // lie on the host, for a part of HostLink's, which is free behind the table. It writes no values:
  // where they are not consistent, slices that are made anew leave them so.
  group.updated = group.device.compute().record();
}

void GatheredParameters::make_source(FlatGroup& group, const UnitShards::ValueRange& range) {
  Source source{&group, range, shards_.gathered_as(group.values.dtype()), {}, 0};
  const auto element = static_cast<std::int64_t>(size_bytes(source.dtype));
  // What comes from the host is these parameters' alone.
  const std::int64_t first = shards_.is_offloaded() ? range.begin : 0;
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < shards_.parameters.size(); ++i) {
    const ParameterState& p = *shards_.parameters[i];
    const std::int64_t chunk = p.spec.chunk_numel();
    if (chunk == 0 || p.group.get() != &group || p.transform) continue;
    if (const std::int64_t at = shards_.offset_of(i); at < range.begin || at >= range.end) continue;
    source.numel += chunk;
    const PackedLayout& packed = shards_.layout.packed;
    const auto at = packed.place_of(i);
    const std::int64_t to =
        at ? packed.offset_bytes + (p.spec.rank * packed.numel + *at) * element
           : shards_.layout.gather_offset_bytes[i] + p.spec.chunk_begin() * element;
    rows.insert(rows.end(), {shards_.offset_of(i) - first, to, chunk});
  }
  if (rows.empty()) return;
  source.table = table_of(rows, shards_.device);
  sources_.push_back(std::move(source));
}

std::uint64_t GatheredParameters::version() const noexcept {
  std::uint64_t writes = 0;
  for (const auto& group : shards_.groups) writes += group->version;
  return writes;
}
bool GatheredParameters::is_stale() const noexcept {
  return shards_.needs_slot() && gathered_version_ != version();
}

// --- gather ---

bool GatheredParameters::gather(const char* name) {
  if (state_ == State::gathering && is_stale()) close();  // nobody has opened it since an update
  if (state_ != State::closed) return false;
  TESSERA_EXPECT(!shards_.group || shards_.group->is_consistent, "unit '", shards_.name,
                 "': an update of its parameters was left half done by a step that failed; load "
                 "parameters and optimizer state on every rank before the next step");
  // First, because it often covers the slot's last use as well.
  if (shards_.needs_slot() && !shards_.is_offloaded())
    for (const auto& group : shards_.groups) shards_.device.gather().wait(group->updated);
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

// Each parameter's own chunk is packed at its offset in the slot, so the all-gather is in place.
bool GatheredParameters::fill_slot(const char* name) {
  const Stream gather = shards_.device.gather();
  if (kept_ && kept_->has(version()) && autograd::in_backward()) {
    kept_->gather(slot_);
    gathered_ = gather.record();
    return true;
  }
  for (const auto& [group, own, dtype, table, numel] : sources_) {
    Tensor values = group->values;
    if (shards_.host)
      values = shards_.host->begin_gather(values.view({own.numel()}, {1}, own.begin), dtype,
                                          group->updated);
    pack("pack_shard", gather, table, numel, values, slot_, dtype);
    if (shards_.host) shards_.host->end_gather();
  }
  if (encoded_) encoded_->encode(slot_);
  if (shards_.size > 1) {
    CollectiveGroup& group = prepared_.next(name);
    group.progress = shards_.at_gather();
    if (group.items().empty())
      for (const GatheredPart& part : parts_) group.edit().push_back(item_of(part));
    const Collective first = item_of(parts_.front());
    group.place(first.send, first.recv);
    const Access accesses[] = {slot_.access(AccessMode::write)};
    shards_.options.mesh.shard_group().gather().submit(group, accesses);
  }
  if (packed_) packed_->copy(gather, slot_);
  if (encoded_) encoded_->decode();
  gathered_ = gather.record();
  return shards_.size > 1;
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
  item.send = at + shards_.options.mesh.shard_rank() * part.count *
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
  if (uses_slot() && autograd::in_backward()) shards_.device.compute().wait(gathered_);
  const bool was_open = state_ == State::open, needs_slot = shards_.needs_slot();
  if (!was_open) advance(State::gathering, State::open);
  const Event* const ready = uses_slot() ? &gathered_ : nullptr;
  for (std::size_t i = 0; i < full_.size(); ++i) {
    ParameterState& p = *shards_.parameters[i];
    Storage& window = *p.window;
    // Also where it has stayed open: what it kept from before an update is an error to use.
    window.version = p.group->version;
    if (was_open) continue;
    p.ready = ready;
    if (needs_slot) {
      window.data = slot_.data + shards_.layout.gather_offset_bytes[i];
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
  shards_.device.context().submit_held();  // it reads the views
  const std::string escaped = state_ == State::open ? escape() : "";
  if (ends_forward && slot_.arena && escaped.empty() && shards_.slots->stays(slot_)) {
    shut_windows();
    return advance(State::open, State::gathering);
  }
  if (state_ != State::closed && uses_slot()) shards_.device.compute().wait(gathered_);
  close_unchecked(ends_forward);
  TESSERA_EXPECT(escaped.empty(), escaped);
}

void GatheredParameters::shut_windows() noexcept {
  for (const auto& p : shards_.parameters) {
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

}  // namespace tessera::shard
