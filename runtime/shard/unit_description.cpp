// What a unit will do, as data: of a ShardPlan.
#include <algorithm>
#include <map>

#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/shard/host_shards.hpp"
#include "runtime/shard/post_forward_shards.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera::shard {
namespace {

// What a gather brings from the host.
std::int64_t copied_bytes(const UnitShards& shards) {
  std::int64_t bytes = encoded_chunk_bytes(shards);
  for (const auto& group : shards.groups())
    for (const auto& [range, gathered] : values_from_host(shards, *group))
      bytes += range.numel() * static_cast<std::int64_t>(size_bytes(gathered));
  return bytes;
}

std::vector<std::string> names_of(const Unit::PrefetchList& list) {
  std::vector<std::string> names;
  for (const auto& weak : list)
    if (const auto unit = weak.lock()) names.push_back(unit->name());
  return names;
}

}  // namespace

ShardPlan::Unit Unit::describe(int gathers, int reductions) const {
  ShardPlan::Unit out;
  out.name = name();
  out.parameters = static_cast<std::int64_t>(shards_.parameters().size());
  std::map<DType, std::int64_t> stored, overridden;
  std::map<std::int64_t, std::int64_t> ragged;
  std::map<int, std::int64_t> along;
  for (const auto& p : shards_.parameters()) {
    out.numel += p->shape.numel();
    out.shard_numel += round_up(p->spec.chunk_numel(), kAlignmentBytes / p->element_bytes());
    if (p->dtype != f32) stored[p->dtype] += p->shape.numel();
    if (p->dtype == f32 && p->compute_dtype != shards_.param_dtype())
      overridden[p->compute_dtype] += p->shape.numel();
    if (p->spec.is_ragged() && shards_.size() > 1) ragged[p->spec.block_rows] += p->shape.numel();
    if (p->spec.dim > 0) along[p->spec.dim] += p->shape.numel();
  }
  out.stored.assign(stored.begin(), stored.end());
  out.overridden.assign(overridden.begin(), overridden.end());
  out.ragged.assign(ragged.begin(), ragged.end());
  out.along.assign(along.begin(), along.end());
  out.gather_bytes = out.wire_bytes = shards_.gather_bytes();
  for (const auto& p : shards_.parameters()) {
    if (!p->transform) continue;
    out.wire_bytes -= UnitLayout::bytes_of(p->spec, p->compute_dtype);
    if (std::ranges::find(out.transforms, p->transform->name()) == out.transforms.end())
      out.transforms.emplace_back(p->transform->name());
  }
  if (shards_.has_buffer())
    out.gradient_buffer_bytes = out.reduced_bytes = shards_.layout().gradient_buffer_bytes;
  const auto copied = [](const ParameterState& p, DType dtype) {
    return p.spec.padded_numel() * static_cast<std::int64_t>(size_bytes(dtype));
  };
  for (const std::size_t i : shards_.layout().packed.entries) {
    const ParameterState& p = *shards_.parameters()[i];
    ++out.packed_parameters;
    out.packed_bytes += copied(p, p.compute_dtype);
    out.wire_bytes -= UnitLayout::bytes_of(p.spec, p.compute_dtype);
  }
  for (const PieceLayout& piece : shards_.layout().pieces)
    for (const std::size_t entry : piece.packed.entries) {
      const ParameterState& p = *shards_.parameters()[shards_.parameter_of()[piece.first + entry]];
      ++out.packed_gradient_parameters;
      out.packed_gradient_bytes += copied(p, shards_.reduce_dtype());
      out.reduced_bytes -= UnitLayout::bytes_of(p.spec, shards_.reduce_dtype());
    }
  std::int64_t reduced = 0;  // what a reduction leaves on this rank
  if (buffer_)
    for (const GradientPiece& piece : buffer_->pieces()) {
      reduced += piece.shard_bytes();
      if (shards_.is_slice() && !shards_.options().slices_wait)
        continue;  // it reduces all that comes
      out.unsharded_gradient_bytes += piece.waiting_bytes();
      if (shards_.has_replicas())
        out.postponed_sum_bytes += round_up(piece.shard_bytes(), kAlignmentBytes);
    }
  out.param = shards_.param_dtype();
  out.reduce = shards_.reduce_dtype();
  out.reshard_after_forward = !keeps_open();
  if (const PostForwardShards* const kept = parameters_.kept()) {
    out.post_forward_bytes = kept->bytes();
    out.post_forward_ranks = kept->ranks();
    out.post_forward_gathers = std::min(gathers, 1);  // the first that backward comes to
    for (const auto& p : shards_.parameters())
      out.post_forward_wire_bytes += UnitLayout::bytes_of(p->spec, p->compute_dtype);
  }
  if (shards_.size() > 1) out.gathers_per_call = gathers;
  if (out.gradient_buffer_bytes > 0 && shards_.ranks() > 1 && shards_.reductions().reduces)
    out.reductions_per_call = reductions;
  if (shards_.has_replicas() && shards_.reductions().all_reduces && reduced > 0) {
    out.all_reduces_per_call = out.reductions_per_call;
    out.all_reduce_bytes = reduced;
  }
  if (shards_.is_offloaded()) {
    out.copied_to_device_bytes = (gathers - out.post_forward_gathers) * copied_bytes(shards_);
    out.copied_to_host_bytes = shards_.reductions().reduces ? reductions * reduced : 0;
  }
  out.prefetch_depth = shards_.options().prefetch_depth;
  out.reductions_in_flight = shards_.options().reductions_in_flight;
  if (!shards_.is_slice()) {  // whose calls are no module's
    const MixedPrecision& precision = shards_.options().precision;
    out.output = precision.output;
    out.casts_inputs = precision.cast_forward_inputs || !precision.param;
  }
  out.divide_factor = shards_.reductions().divide_factor;
  out.has_all_reduce_hook = !!shards_.reductions().hook;
  out.reshards_after_backward = reshards_after_backward();
  out.forward_prefetch = names_of(prefetch_list(Prefetch::forward));
  out.backward_prefetch = names_of(prefetch_list(Prefetch::backward));
  return out;
}

}  // namespace tessera::shard
