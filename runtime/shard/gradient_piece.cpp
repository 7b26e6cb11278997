#include "runtime/shard/gradient_piece.hpp"

#include <algorithm>
#include <utility>

#include "runtime/shard/hooked_sums.hpp"
#include "runtime/shard/host_gradients.hpp"
#include "runtime/shard/packed_gradients.hpp"
#include "runtime/shard/replica_sums.hpp"
#include "runtime/shard/symmetric_gradients.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::shard {

GradientPiece::GradientPiece(const UnitShards& shards, const PieceLayout& layout)
    : shards_(shards),
      layout_(layout),
      prepared_(shards.device(), StreamId::reduce),
      prepared_apart_(shards.device(), StreamId::reduce),
      buffer_(std::make_shared<Storage>(Storage{.device = shards.device(), .bytes = layout.bytes})),
      reduced_into_(shards.group()->gradients),  // one that is there it adds to
      arrived_(size()),
      waiting_(size()) {
  if (!layout.packed.is_empty())
    put_stage<ReduceStage>(stages_, std::make_unique<PackedGradients>(shards, layout));
  std::vector<std::int64_t> entries, gaps;
  const std::int64_t wire = wire_bytes();
  range_.begin = range_.end = shards.gradient_offset_of(parameter(0));
  range_.counts = static_cast<std::int64_t>(size());
  range_.counts_begin = shards.group()->gradient_numel + shards.first_trainable() +
                        static_cast<std::int64_t>(layout.first);
  for (std::size_t i = 0; i < size(); ++i) {
    const ParameterState& p = *shards.parameters()[parameter(i)];
    gradients_.push_back(
        Tensor::wrap(buffer_, p.shape, shards.reduce_dtype(), layout.offset_bytes[i])
            .view(p.shape, p.spec.strides(p.shape), 0));
    entries.insert(entries.end(),
                   {layout.offset_bytes[i], p.shape.numel() * wire, p.spec.padded_numel() * wire});
    const std::int64_t offset = range_.numel(), chunk = p.spec.chunk_numel();
    // What follows a slice is the next one, but for the last.
    const std::int64_t first = shards.first_of(parameter(i)),
                       whole = shards.entry_of(parameter(i)).chunk;
    const bool is_last = first + chunk == whole;
    const std::int64_t padded = is_last ? round_up(whole, kFlatAlign) - first : chunk;
    has_gaps_ |= padded > chunk;
    gaps.insert(gaps.end(), {offset * wire, chunk * wire, padded * wire});
    range_.end += padded;
  }
  entries_ = kernel_table(entries, shards.device());
  gaps_ = kernel_table(gaps, shards.device());
  if (shards.reductions().hook)
    put_stage<ReduceStage>(stages_, std::make_unique<HookedSums>(*this, shards));
  if (shards.is_offloaded())
    put_stage<ReduceStage>(stages_, std::make_unique<HostGradients>(*this, shards));
}

// --- its stages ---

void GradientPiece::set_replicas(Replicas* replicas) {
  remove_stage(stages_, ReduceStage::Place::replicas);
  if (replicas)
    put_stage<ReduceStage>(stages_, std::make_unique<ReplicaSums>(*this, shards_, *replicas));
}

void GradientPiece::set_hook(bool is_hooked) {
  remove_stage(stages_, ReduceStage::Place::hook);
  if (is_hooked) put_stage<ReduceStage>(stages_, std::make_unique<HookedSums>(*this, shards_));
}

void GradientPiece::set_symmetric(SymmetricGradients* gradients) {
  remove_stage(stages_, ReduceStage::Place::gradient);
  if (gradients && gradients->holds(*shards_.group()))
    put_stage<ReduceStage>(stages_, std::make_unique<SymmetricGradient>(shards_, *gradients));
}

// --- filling ---

void GradientPiece::take() {
  if (!is_taken()) slot_ = shards_.take(SlotKind::gradients, layout_.bytes);
}

void GradientPiece::begin_use() {
  slot_.arena->begin_use(slot_, StreamId::compute);
  is_filling_ = true;
  buffer_->data = slot_.data;
  buffer_->use = slot_.use;
  arrived_.clear();
  for (std::size_t i = 0; i < size(); ++i) {
    if (!waiting_[i].defined()) continue;
    raw::copy_into(gradients_[i], std::exchange(waiting_[i], {}));
    arrived_.add(i);
  }
}

autograd::GradientSink GradientPiece::sink(std::size_t at) {
  const std::size_t i = at - layout_.first;
  const double factor = 1 / shards_.reductions().divide_factor;
  if (is_taken()) {
    if (!is_filling_) begin_use();
    const bool is_there = arrived_.add(i);
    return {gradients_[i], factor, is_there};
  }
  const bool is_there = waiting_[i].defined();
  if (!is_there) {
    const OwnerGuard owner(shards_.device(), "unsharded gradients");
    // As in the slot: what is sharded along another dimension is written, and rounded, alike.
    const Tensor& there = gradients_[i];
    waiting_[i] = Tensor::empty({there.numel()}, shards_.reduce_dtype(), shards_.device())
                      .view(there.shape(), there.strides(), 0);
  }
  return {waiting_[i], factor, is_there};
}

void GradientPiece::give_back() noexcept {
  if (!slot_.arena) return;
  is_filling_ = false;
  buffer_->data = nullptr;
  shards_.give_back(slot_);
  slot_ = {};
}

// --- reducing ---

// The flat gradient may be older than this piece's part of it: the pieces of a unit and the slices
// of a streamed parameter fill one in turn.
void GradientPiece::reduce() {
  if (!is_filling_) begin_use();  // nothing arrived here: zeros travel
  for (const auto& stage : stages_)
    if (stage->postpones()) return postpone(*stage);
  Stream last = shards_.device().reduce();
  bool is_elsewhere = false;
  for (const auto& stage : stages_) {
    last = stage->stream(last);
    is_elsewhere = is_elsewhere || stage->is_elsewhere();
  }
  FlatGroup& group = *shards_.group();
  group.note_gradient();
  if (!group.gradient.defined())
    group.gradient = fresh_gradient(), ++group.gradients;
  else if (!is_elsewhere)
    last.wait(group.reduced);  // on the stream of a hook
  group.apply_factor();
  const bool is_fresh = std::exchange(reduced_into_, group.gradients) != group.gradients;
  complete();
  const Sums gradient{&group.gradient, range_.begin, range_.counts_begin};
  const bool is_direct = is_fresh && shards_.reduce_dtype() == f32 && !is_elsewhere;
  Reduction r{gradient, gradient, last, is_fresh, is_direct, {}};
  Tensor staged;
  if (!is_direct && !is_elsewhere) {
    staged = staging(last.id(), "staging");
    r.sums = sums_in(staged);
  }
  for (auto stage = stages_.rbegin(); stage != stages_.rend(); ++stage) (*stage)->place(r);
  scatter(r.sums);
  for (const auto& stage : stages_) stage->pass(r);
  if (!r.reduced && !is_direct) {
    accumulate(r.last, values_of(gradient), values_of(r.sums), is_fresh);
    accumulate(r.last, counts_of(gradient), counts_of(r.sums), is_fresh);
  }
  give_back();
  group.reduced = r.reduced ? *r.reduced : r.last.record();
}

// The sums stay with the stage.
void GradientPiece::postpone(ReduceStage& stage) {
  complete();
  Reduction r{{}, {}, shards_.device().reduce(), false, false, {}};
  stage.place(r);
  scatter(r.sums);
  stage.pass(r);
  give_back();
}

// Zeros where no gradient came, and behind the last one a 0 or 1 for each: summed over the ranks
// they are the arrival counts. On the stream of reductions, which waits for compute here.
void GradientPiece::complete() {
  const Stream reduce = shards_.device().reduce();
  reduce.wait(shards_.device().compute().record());
  for (std::size_t word = 0; word < arrived_.words(); ++word) {
    kernels::CompleteArgs args{};
    args.base = buffer_->data;
    args.entries = reinterpret_cast<const kernels::FlatSpan*>(entries_.data());
    args.counts = buffer_->data + layout_.counts_offset_bytes;
    args.counts_stride_bytes = range_.counts * wire_bytes();
    args.arrived = arrived_.word(word);
    args.first = static_cast<std::int32_t>(word * 64);
    args.entry_count = static_cast<std::int32_t>(range_.counts);
    args.copies = shards_.size();
    args.dtype = shards_.reduce_dtype();
    args.zero_missing = true;
    const Access accesses[] = {entries_.access(AccessMode::read), slot_.access(AccessMode::read),
                               slot_.access(AccessMode::write)};
    const double bytes = static_cast<double>(entries_.storage()->bytes) + missing_bytes(word);
    reduce.launch(
        {.name = "complete_gradient_piece", .cost = {.bytes = bytes}, .accesses = accesses},
        kernels::Call<kernels::CompleteArgs>{detail::table(shards_.device()).complete, args});
  }
}

// Of the buffer what becomes zeros for the 64 entries of `word`: gradients that did not come.
// Padding and counts are next to nothing.
double GradientPiece::missing_bytes(std::size_t word) const {
  std::int64_t missing = 0;
  for (std::size_t i = word * 64; i < std::min(word * 64 + 64, size()); ++i)
    if (!arrived_.has(i)) missing += shards_.parameters()[parameter(i)]->spec.padded_numel();
  return static_cast<double>(missing * wire_bytes());
}

// Where this piece has a part of it only, the rest is zeros: nobody may have a gradient for it.
Tensor GradientPiece::fresh_gradient() const {
  const FlatGroup& group = *shards_.group();
  const OwnerGuard owner(group.device, "gradients");
  Tensor fresh;
  for (const auto& stage : stages_)
    if (!fresh.defined()) fresh = stage->fresh_gradient();
  if (!fresh.defined())
    fresh = Tensor::empty({group.gradient_numel + group.counts_numel()}, f32, group.device);
  if (range_.numel() < group.gradient_numel) raw::fill(fresh, 0);
  return fresh;
}

Tensor GradientPiece::staging(StreamId stream, const char* owned_by) const {
  const OwnerGuard owner(shards_.device(), owned_by);
  return Tensor::wrap(Storage::owned(shards_.device(), shard_bytes(), stream), {shard_numel()},
                      shards_.reduce_dtype());
}

// Queues the reduce-scatter of the buffer into its parts of a flat gradient. What is packed has
// gaps that nobody has written, and that are cleared behind it.
void GradientPiece::scatter(const Sums& to) {
  for (const auto& stage : stages_) stage->pack(slot_);
  // Counts lie behind the values, or apart from them, behind all of the unit's.
  const bool is_apart = to.counts != to.values + range_.numel();
  CollectiveGroup& group =
      (is_apart ? prepared_apart_ : prepared_).next(with_what_was_kept(shards_.reduce_name()));
  shards_.tell_progress_of_reduction(group);
  if (group.items().empty()) list_items(to, group.edit());
  group.place(buffer_->data + layout_.counts_offset_bytes,
              to.flat->data() + to.counts * wire_bytes());
  const Access accesses[] = {slot_.access(AccessMode::read),
                             to.flat->access(AccessMode::write, to.values, range_.numel()),
                             to.flat->access(AccessMode::write, to.counts, range_.counts)};
  shards_.options().mesh.shard_group().reduce().submit(group, accesses);
  clear_gaps(to);
}

// Counts first, which every rank has.
void GradientPiece::list_items(const Sums& to, std::vector<Collective>& items) const {
  std::byte* const flat = to.flat->data();
  items.push_back({.send = buffer_->data + layout_.counts_offset_bytes,
                   .recv = flat + to.counts * wire_bytes(),
                   .count = range_.counts,
                   .kind = CollectiveKind::reduce_scatter,
                   .dtype = shards_.reduce_dtype()});
  // What is packed lies in the flat gradient as it travels: before the others.
  const PackedLayout& packed = layout_.packed;
  Collective together = items.front();
  together.send = buffer_->data + packed.offset_bytes;
  together.recv = flat + to.values * wire_bytes();
  together.count = packed.numel;
  if (!packed.is_empty()) items.push_back(together);
  for (std::size_t i = packed.entries.size(); i < size(); ++i) {
    const ShardSpec& spec = shards_.parameters()[parameter(i)]->spec;
    std::byte* const from = buffer_->data + layout_.offset_bytes[i];
    const std::int64_t begin = shards_.gradient_offset_of(parameter(i)) - range_.begin;
    Collective item = items.front();
    item.send = from;
    item.recv = flat + (to.values + begin) * wire_bytes();
    item.count = spec.chunk_numel();
    if (!spec.is_ragged()) items.push_back(item);
    item.kind = CollectiveKind::reduce;
    for (int r = 0; spec.is_ragged() && r < spec.world; ++r) {
      const RowRange rows = spec.owned(r);
      Collective one = item;
      one.send = from + rows.begin * spec.row_numel() * wire_bytes();
      if (r != spec.rank) one.recv = nullptr;
      one.count = rows.size() * spec.row_numel();
      one.root = r;
      if (rows.size() > 0) items.push_back(one);
    }
  }
}

void GradientPiece::accumulate(Stream stream, const Tensor& to, const Tensor& staged,
                               bool is_fresh) const {
  kernels::AxpbyArgs args{};
  args.y = to.data();
  args.x = staged.data();
  args.alpha = 1;
  args.beta = is_fresh ? 0 : 1;
  args.count = staged.numel();
  args.y_dtype = to.dtype();
  args.x_dtype = staged.dtype();
  const Access accesses[] = {staged.access(AccessMode::read), to.access(AccessMode::write)};
  const auto element = static_cast<double>(size_bytes(to.dtype()));
  const double bytes =
      (static_cast<double>(size_bytes(staged.dtype())) + (is_fresh ? element : 2 * element)) *
      static_cast<double>(staged.numel());
  stream.launch({.name = "accumulate_shard", .cost = {.bytes = bytes}, .accesses = accesses},
                kernels::Call<kernels::AxpbyArgs>{detail::table(shards_.device()).axpby, args});
}

// Zeroes the alignment gaps between the entries of a flat array, so that sums over all of it are
// sums over the entries.
void GradientPiece::clear_gaps(const Sums& sums) const {
  if (!has_gaps_) return;
  const Tensor flat = values_of(sums);
  kernels::CompleteArgs args{};
  args.base = flat.data();
  args.entries = reinterpret_cast<const kernels::FlatSpan*>(gaps_.data());
  args.arrived = ~std::uint64_t{0};
  args.entry_count = static_cast<std::int32_t>(range_.counts);
  args.dtype = shards_.reduce_dtype();
  const Access accesses[] = {gaps_.access(AccessMode::read), flat.access(AccessMode::write)};
  for (args.first = 0; args.first < args.entry_count; args.first += 64)
    shards_.device().reduce().launch(
        {.name = "clear_gaps", .accesses = accesses},
        kernels::Call<kernels::CompleteArgs>{detail::table(shards_.device()).complete, args});
}

// --- what is kept from pass to pass ---

void GradientPiece::drop_kept() noexcept {
  for (Tensor& gradient : waiting_) gradient = {};
  for (const auto& stage : stages_) stage->drop();
}

void GradientPiece::drop_kept(std::size_t at) {
  const std::size_t i = at - layout_.first;
  waiting_[i] = {};
  for (const auto& stage : stages_)
    stage->drop_entry(i, shards_.gradient_offset_of(parameter(i)) - range_.begin,
                      shards_.parameters()[parameter(i)]->spec.chunk_numel());
}

std::int64_t GradientPiece::waiting_bytes() const noexcept {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < size(); ++i)
    bytes +=
        round_up(shards_.parameters()[parameter(i)]->shape.numel() * wire_bytes(), kAlignmentBytes);
  return bytes;
}

const char* GradientPiece::with_what_was_kept(const char* name) const {
  const std::vector<bool>& kept = shards_.group()->unreduced;
  const std::size_t first = static_cast<std::size_t>(shards_.first_trainable()) + layout_.first;
  if (first < kept.size() && kept[first])
    return shards_.device().context().intern(concat(name, " (with what was kept unreduced)"));
  if (!shards_.is_given_outside()) return name;
  return shards_.device().context().intern(concat(name, " (unshard, outside of calls)"));
}

}  // namespace tessera::shard
