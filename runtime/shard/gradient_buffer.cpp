#include "runtime/shard/gradient_buffer.hpp"

#include <algorithm>

#include "runtime/tensor/launch.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::shard {

GradientBuffer::GradientBuffer(const UnitShards& shards)
    : shards_(shards),
      prepared_(shards.device, StreamId::reduce),
      arrived_(shards.trainable->entries.size()) {
  std::vector<std::int64_t> entries, gaps_f32, gaps_reduce;
  const auto wire = static_cast<std::int64_t>(size_bytes(shards.reduce_dtype()));
  const FlatGroup& group = *shards.trainable;
  for (std::size_t at = 0; at < group.entries.size(); ++at) {
    const std::size_t i = shards.parameter_of[at];
    const ParameterState& p = *shards.parameters[i];
    entries.insert(entries.end(), {shards.layout.gradient_offset_bytes[i], p.shape.numel() * wire,
                                   p.spec.padded_numel() * wire});
    const FlatEntry& entry = group.entries[at];
    const std::int64_t end =
        at + 1 < group.entries.size() ? group.entries[at + 1].offset : group.numel;
    gaps_f32.insert(gaps_f32.end(), {entry.offset * 4, entry.chunk * 4, (end - entry.offset) * 4});
    gaps_reduce.insert(gaps_reduce.end(),
                       {entry.offset * wire, entry.chunk * wire, (end - entry.offset) * wire});
  }
  entries_ = table_of(entries, shards.device);
  gaps_f32_ = table_of(gaps_f32, shards.device);
  gaps_reduce_ = wire == 4 ? gaps_f32_ : table_of(gaps_reduce, shards.device);
}

// --- filling ---

void GradientBuffer::take() {
  if (!slot_.arena) slot_ = shards_.take(SlotKind::gradients);
}

void GradientBuffer::begin_use() {
  take();
  slot_.arena->begin_use(slot_, StreamId::compute);
  buffer_ = Storage::borrowed(shards_.device, slot_.data, slot_.bytes, *slot_.use);
  arrived_.clear();
}

autograd::GradientSink GradientBuffer::sink(int entry) {
  if (!buffer_) begin_use();
  const auto at = static_cast<std::size_t>(entry);
  const std::size_t i = shards_.parameter_of[at];
  const bool is_there = arrived_.add(at);
  return {Tensor::wrap(buffer_, shards_.parameters[i]->shape, shards_.reduce_dtype(),
                       shards_.layout.gradient_offset_bytes[i]),
          1.0 / shards_.size(), is_there};
}

void GradientBuffer::drop() noexcept {
  if (!slot_.arena) return;
  buffer_.reset();
  shards_.give_back(slot_);
  slot_ = {};
}

// --- reducing ---

void GradientBuffer::reduce() {
  if (!buffer_) begin_use();  // nothing arrived here: zeros travel
  complete();
  FlatGroup& group = *shards_.trainable;
  const bool is_fresh = !group.gradient.defined();
  if (is_fresh) group.gradient = fresh_gradient();
  const Stream reduce = shards_.device.reduce();
  reduce.wait(shards_.device.compute().record());
  Tensor staged;
  if (is_fresh && shards_.reduce_dtype() == f32) {
    scatter(group.gradient);
  } else {
    staged = staging();
    scatter(staged);
    accumulate(staged, is_fresh);
  }
  drop();
  group.reduced = reduce.record();
}

// Zeros where no gradient came, and behind the last one a 0 or 1 for each: summed over the ranks
// they are the arrival counts.
void GradientBuffer::complete() {
  const DType dtype = shards_.reduce_dtype();
  const Tensor all =
      Tensor::wrap(buffer_, {buffer_->bytes / static_cast<std::int64_t>(size_bytes(dtype))}, dtype);
  for (std::size_t word = 0; word < arrived_.words(); ++word) {
    kernels::CompleteArgs args{};
    args.base = buffer_->data;
    args.entries = reinterpret_cast<const kernels::FlatSpan*>(entries_.data());
    args.counts = buffer_->data + shards_.layout.counts_offset_bytes;
    args.counts_stride_bytes = shards_.layout.counts_chunk_bytes;
    args.arrived = arrived_.word(word);
    args.first = static_cast<std::int32_t>(word * 64);
    args.entry_count = static_cast<std::int32_t>(shards_.trainable->entries.size());
    args.copies = shards_.size();
    args.dtype = dtype;
    args.zero_missing = true;
    detail::launch("complete_gradient_buffer", shards_.device,
                   detail::table(shards_.device).complete, args,
                   {detail::reads(entries_), {&all, AccessMode::write, missing_part(word)}});
  }
}

// The part of the buffer that becomes zeros for the 64 entries of `word`: gradients that did not
// come. Padding and counts are next to nothing.
double GradientBuffer::missing_part(std::size_t word) const {
  const std::vector<FlatEntry>& entries = shards_.trainable->entries;
  std::int64_t missing = 0;
  const std::size_t end = std::min(word * 64 + 64, entries.size());
  for (std::size_t at = word * 64; at < end; ++at)
    if (!arrived_.has(at)) missing += entries[at].chunk * shards_.size();
  return static_cast<double>(missing) * static_cast<double>(size_bytes(shards_.reduce_dtype())) /
         static_cast<double>(buffer_->bytes);
}

Tensor GradientBuffer::fresh_gradient() const {
  const FlatGroup& group = *shards_.trainable;
  const OwnerGuard owner(shards_.device, "gradients");
  Tensor gradient = Tensor::empty({group.numel + group.counts_numel()}, f32, shards_.device);
  clear_gaps(shards_.device.compute(), gradient, gaps_f32_);
  return gradient;
}

// As large as the flat gradient, in the dtype of the wire, on the reduce stream's own memory.
Tensor GradientBuffer::staging() const {
  const DType wire = shards_.reduce_dtype();
  const Tensor& gradient = shards_.trainable->gradient;
  const std::int64_t bytes = gradient.numel() * static_cast<std::int64_t>(size_bytes(wire));
  const OwnerGuard owner(shards_.device, "staging");
  Tensor staged =
      Tensor::wrap(Storage::owned(shards_.device, bytes, StreamId::reduce), gradient.shape(), wire);
  clear_gaps(shards_.device.reduce(), staged, gaps_reduce_);
  return staged;
}

// Queues the reduce-scatter of the buffer into `into`, laid out as the flat gradient.
void GradientBuffer::scatter(const Tensor& into) {
  const FlatGroup& flat = *shards_.trainable;
  const DType wire = shards_.reduce_dtype();
  const auto element = static_cast<std::int64_t>(size_bytes(wire));
  CollectiveGroup& group = prepared_.next(shards_.reduce_name);
  group.backward_of = autograd::forward_of_step();
  const auto add = [&](std::int64_t from_bytes, std::int64_t to, std::int64_t count) {
    group.items.push_back({.send = buffer_->data + from_bytes,
                           .recv = into.data() + to * element,
                           .count = count,
                           .kind = CollectiveKind::reduce_scatter,
                           .dtype = wire});
  };
  for (std::size_t at = 0; at < flat.entries.size(); ++at)
    add(shards_.layout.gradient_offset_bytes[shards_.parameter_of[at]], flat.entries[at].offset,
        flat.entries[at].chunk);
  add(shards_.layout.counts_offset_bytes, flat.numel, flat.counts_numel());
  const Access accesses[] = {
      {buffer_->use, buffer_->data, buffer_->data + buffer_->bytes, AccessMode::read},
      into.access(AccessMode::write)};
  shards_.options.mesh.world().reduce().submit(group, accesses);
}

// Adds what was staged to the flat gradient, or makes it the flat gradient.
void GradientBuffer::accumulate(const Tensor& staged, bool is_fresh) const {
  const Tensor& gradient = shards_.trainable->gradient;
  kernels::AxpbyArgs args{};
  args.y = gradient.data();
  args.x = staged.data();
  args.alpha = 1;
  args.beta = is_fresh ? 0 : 1;
  args.count = staged.numel();
  args.y_dtype = f32;
  args.x_dtype = staged.dtype();
  const Access accesses[] = {staged.access(AccessMode::read), gradient.access(AccessMode::write)};
  const double bytes = static_cast<double>(size_bytes(staged.dtype()) + (is_fresh ? 4 : 8)) *
                       static_cast<double>(staged.numel());
  shards_.device.reduce().launch(
      {.name = "accumulate_shard", .cost = {.bytes = bytes}, .accesses = accesses},
      kernels::Call<kernels::AxpbyArgs>{detail::table(shards_.device).axpby, args});
}

// Zeroes the alignment gaps between the entries of a flat array, so that sums over all of it are
// sums over the entries.
void GradientBuffer::clear_gaps(Stream stream, const Tensor& flat, const Tensor& table) const {
  kernels::CompleteArgs args{};
  args.base = flat.data();
  args.entries = reinterpret_cast<const kernels::FlatSpan*>(table.data());
  args.arrived = ~std::uint64_t{0};
  args.entry_count = static_cast<std::int32_t>(shards_.trainable->entries.size());
  args.dtype = shards_.reduce_dtype();
  const Access accesses[] = {table.access(AccessMode::read), flat.access(AccessMode::write)};
  for (args.first = 0; args.first < args.entry_count; args.first += 64)
    stream.launch(
        {.name = "clear_gaps", .accesses = accesses},
        kernels::Call<kernels::CompleteArgs>{detail::table(shards_.device).complete, args});
}

}  // namespace tessera::shard
