// What a sharded model will do, as numbers and as a table.
#include <algorithm>
#include <cstdio>
#include <map>

#include "runtime/shard/host_link.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/base/text.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera::shard {

ShardPlan Context::plan() const {
  ShardPlan plan;
  plan.ranks = group_->size();
  plan.replicas = mesh().replicas();
  for (const auto& weak : units_)
    if (const auto unit = weak.lock()) plan.units.push_back(unit->describe());
  plan.arena_bytes = slots_->bytes();
  plan.most_alive_bytes = slots_->most_alive();
  plan.is_assumed = slots_->is_new();
  if (host_link_) {
    plan.offload_device_bytes = host_link_->device_bytes();
    plan.offload_host_bytes = host_link_->host_bytes();
  }
  return plan;
}

ShardCounters Context::counters() const {
  return {.gathers = gathers_,
          .reductions = reductions_,
          .all_reduces = all_reduces_,
          .unplanned_slots = slots_->unplanned()};
}

ShardPlan::Unit Unit::describe() const {
  const bool is_shared = shards_.size() > 1;
  ShardPlan::Unit out;
  out.name = name();
  out.parameters = static_cast<std::int64_t>(shards_.parameters.size());
  std::map<DType, std::int64_t> stored;
  for (const auto& p : shards_.parameters) {
    out.numel += p->shape.numel();
    out.shard_numel += round_up(p->spec.chunk_numel(), kAlignmentBytes / p->element_bytes());
    if (p->dtype != f32) stored[p->dtype] += p->shape.numel();
  }
  out.stored.assign(stored.begin(), stored.end());
  out.gather_bytes = out.wire_bytes = shards_.gather_bytes();
  for (const auto& p : shards_.parameters) {
    if (!p->transform) continue;
    out.wire_bytes -= UnitLayout::bytes_of(p->spec, p->compute_dtype);
    if (std::ranges::find(out.transforms, p->transform->name()) == out.transforms.end())
      out.transforms.emplace_back(p->transform->name());
  }
  out.gradient_buffer_bytes = shards_.gradient_bytes();
  if (buffer_ &&
      (!shards_.is_slice || shards_.options.slices_wait))  // else it reduces all that comes
    for (const GradientPiece& piece : buffer_->pieces()) {
      out.unsharded_gradient_bytes += piece.held_bytes();
      if (shards_.replicas)
        out.postponed_sum_bytes += round_up(piece.shard_bytes(), kAlignmentBytes);
    }
  out.param = shards_.param_dtype();
  out.reduce = shards_.reduce_dtype();
  out.reshard_after_forward = !control_.keeps_open();
  if (const PostForwardShards* const kept = parameters_.kept()) {
    out.post_forward_bytes = kept->bytes();
    out.post_forward_ranks = kept->ranks();
  }
  if (is_shared) out.gathers_per_call = planned_gathers_;
  if (out.gradient_buffer_bytes > 0 && shards_.ranks() > 1)
    out.reductions_per_call = planned_reductions_;
  return out;
}

}  // namespace tessera::shard

namespace tessera {

namespace {

std::string with_commas(std::int64_t n) { return tessera::with_commas(std::to_string(n)); }

}  // namespace

ShardPlan shard_plan(nn::Module& root) {
  return shard::root_unit("shard_plan", root)->context()->plan();
}

ShardPlan shard_plan(nn::Module& root,
                     const std::function<std::shared_ptr<nn::Module>(World&)>& step) {
  const std::shared_ptr<shard::Unit> unit = shard::root_unit("shard_plan", root);
  shard::Context& context = *unit->context();
  TESSERA_EXPECT(
      unit->shards().is_root() && !context.is_planned_or_run(), "shard_plan: unit '", unit->name(),
      unit->shards().is_root() ? "' has run, or been planned so; do it once, before the first step"
                               : "' is no root; plan a step of the root's");
  const World& world = unit->shards().options.mesh.world();
  World planned = World::emulated(
      world.rank(), world.size(),
      {.device = {.kind = context.device().kind()}, .executor = ExecutorKind::virtual_});
  const autograd::RandomStateGuard as_before(autograd::random_state());
  const std::shared_ptr<nn::Module> model = step(planned);
  TESSERA_EXPECT(model != nullptr, "shard_plan: the step returned no model");
  context.follow_plan(*shard::root_unit("shard_plan", *model)->context());
  return context.plan();
}

ShardCounters shard_counters(nn::Module& root) {
  return shard::root_unit("shard_counters", root)->context()->counters();
}

std::string ShardPlan::to_string() const {
  std::string out = concat("plan for ", ranks, ranks == 1 ? " rank" : " ranks",
                           replicas > 1 ? concat(", in ", replicas, " replicas") : "", "\n");
  char line[256];
  std::snprintf(line, sizeof line, "  %-28s %7s %15s %15s %5s %6s %8s %8s %9s\n", "unit", "tensors",
                "elements", "shard elements", "param", "reduce", "reshard", "gathers", "reduces");
  out += line;
  for (const Unit& u : units) {
    std::snprintf(line, sizeof line, "  %-28s %7lld %15s %15s %5s %6s %8s %8d %9d\n",
                  u.name.c_str(), static_cast<long long>(u.parameters),
                  with_commas(u.numel).c_str(), with_commas(u.shard_numel).c_str(),
                  std::string(tessera::name(u.param)).c_str(),
                  std::string(tessera::name(u.reduce)).c_str(),
                  u.post_forward_ranks > 0  ? concat("to ", u.post_forward_ranks).c_str()
                  : u.reshard_after_forward ? "yes"
                                            : "no",
                  u.gathers_per_call, u.reductions_per_call);
    out += line;
  }
  std::int64_t gathers = 0, reductions = 0, gathered = 0, reduced = 0;
  for (const Unit& u : units) {
    gathers += u.gathers_per_call;
    reductions += u.reductions_per_call;
    gathered += u.gathers_per_call * u.wire_bytes;
    reduced += u.reductions_per_call * u.gradient_buffer_bytes;
  }
  out += concat("  collectives of one forward and backward: ", gathers, " all-gathers of ",
                with_commas(gathered), " bytes, ", reductions, " reduce-scatters of ",
                with_commas(reduced), " bytes\n");
  for (const Unit& u : units)
    for (const auto& [dtype, numel] : u.stored)
      out += concat("  '", u.name, "' stores and gathers ", with_commas(numel),
                    " frozen elements as ", dtype, "\n");
  for (const Unit& u : units)
    for (const std::string& name : u.transforms)
      out += concat("  '", u.name, "' gathers by '", name, "': ", with_commas(u.wire_bytes),
                    " bytes of a slot of ", with_commas(u.gather_bytes), "\n");
  std::int64_t kept = 0, held = 0, postponed = 0;
  for (const Unit& u : units) {
    kept += u.post_forward_bytes;
    held += u.unsharded_gradient_bytes;
    postponed += u.postponed_sum_bytes;
  }
  if (kept > 0)
    out += concat("  from forward to backward ", with_commas(kept), " bytes of parameters stay\n");
  if (held > 0)
    out += concat(
        "  without gradient sync ", with_commas(held), " bytes of unsharded gradients",
        postponed > 0 ? concat(", without all-reduce ", with_commas(postponed), " of sums") : "",
        "\n");
  out += concat("  arena ", with_commas(arena_bytes), " bytes of slots, ",
                with_commas(most_alive_bytes), " alive at a time, planned from ",
                is_assumed ? "one call of each unit in the order of the module tree\n"
                           : "the steps so far\n");
  if (offload_device_bytes > 0)
    out += concat("  offload: shards, their gradients and moments on the host; staging ",
                  with_commas(offload_device_bytes), " bytes on the device, ",
                  with_commas(offload_host_bytes), " on the host\n");
  return out;
}

}  // namespace tessera
