// The gradients of a unit: the run that kernels write them to, and its reduction into the flat
// gradient of this rank's shards.
#include <algorithm>

#include "runtime/shard/unit.hpp"
#include "runtime/tensor/launch.hpp"

namespace tessera::shard {

void Unit::take_run() {
  run_slot_ = reduce_ring_->take(layout_.run_bytes, StreamId::compute);
  run_ = std::make_shared<Storage>(
      Storage{device_, {}, run_slot_.data, run_slot_.bytes, run_slot_.use, 0, "", nullptr});
  std::fill(held_.begin(), held_.end(), false);
  std::fill(arrived_.begin(), arrived_.end(), 0);
}

autograd::GradientSink Unit::sink(int entry) {
  context_->schedule_end();
  owes_reduction_ = true;
  if (local_) return local_->sink(entry);
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

// The part of the run that becomes zeros for the 64 entries of `word`: gradients that did not come.
// Padding and counts are next to nothing.
double Unit::missing_part(std::size_t word) const {
  std::int64_t missing = 0;
  const std::size_t end = std::min(word * 64 + 64, trainable_->entries.size());
  for (std::size_t at = word * 64; at < end; ++at)
    if ((arrived_[word] >> (at % 64) & 1) == 0) missing += trainable_->entries[at].chunk * size();
  return static_cast<double>(missing) * static_cast<double>(size_bytes(reduce_dtype())) /
         static_cast<double>(run_->bytes);
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
                   {detail::reads(run_places_), {&run, AccessMode::write, missing_part(word)}});
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
// Whoever reads the gradient waits for that record.
void Unit::reduce() {
  owes_reduction_ = false;
  reduced_in_ = context_->pass();
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
  CollectiveGroup& group = prepare(reduce_name_, StreamId::reduce);
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
    const auto passes = static_cast<double>(element + (fresh ? 4 : 8));
    reduce.launch(
        {.name = "accumulate_shard",
         .cost = {.bytes = passes * static_cast<double>(target.numel())},
         .accesses = add},
        kernels::Call<kernels::AxpbyArgs>{detail::table(device_).elementwise.axpby, args});
  }
  drop_run();
  trainable_->reduced = reduce.record();
  context_->reduced(trainable_->reduced);
}

}  // namespace tessera::shard
