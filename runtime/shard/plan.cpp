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
  std::vector<AssumedCall> calls = calls_;
  for (AssumedCall& call : calls)  // set_unshard_in_backward may have come since
    if (const auto called = unit(call.unit); called && !called->shards().is_slice)
      call.is_read_in_backward = called->control().is_read_in_backward();
  const std::vector<UnitNeeds> needs = this->needs();
  std::vector<SlotUse> uses = assumed_step(needs, calls);
  join_at_turn(uses);
  std::vector<int> gathers(units_.size()), pieces(units_.size());  // of each unit
  for (const SlotUse& use : uses)
    ++(use.kind == SlotKind::parameters ? gathers : pieces)[static_cast<std::size_t>(use.unit)];
  for (std::size_t i = 0; i < units_.size(); ++i)
    if (const auto unit = units_[i].lock())
      plan.units.push_back(unit->describe(
          gathers[i], pieces[i] / std::max(static_cast<int>(needs[i].pieces.size()), 1)));
  plan.forwards_ahead = forwards_ahead_;
  plan.arena_bytes = slots_->bytes();
  plan.most_alive_bytes = slots_->most_alive();
  plan.is_assumed = slots_->is_new();
  if (host_link_) {
    plan.offload_device_bytes = host_link_->device_bytes();
    plan.offload_host_bytes = host_link_->host_bytes();
  }
  return plan;
}

std::int64_t Slots::most_alive() const noexcept {
  std::int64_t most = 0;
  for (const auto& [step, kept] : kept_) most = std::max(most, kept.plan.most_alive);
  return most;
}

std::int64_t GradientPiece::held_bytes() const noexcept {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < size(); ++i)
    bytes +=
        round_up(shards_.parameters[parameter(i)]->shape.numel() * wire_bytes(), kAlignmentBytes);
  return bytes;
}

ShardCounters Context::counters() const {
  ShardCounters counters = counters_;
  counters.unplanned_slots = slots_->unplanned();
  counters.slot_plans = slots_->made();
  return counters;
}

namespace {

// What a gather brings from the host.
std::int64_t copied_bytes(const UnitShards& shards) {
  std::int64_t bytes = encoded_chunk_bytes(shards);
  for (const auto& group : shards.groups) {
    const DType gathered = shards.gathered_as(group->values.dtype());
    for (const UnitShards::ValueRange& range : plain_values(shards, *group))
      bytes += range.numel() * static_cast<std::int64_t>(size_bytes(gathered));
  }
  return bytes;
}

std::vector<std::string> names_of(const UnitControl::PrefetchList& list) {
  std::vector<std::string> names;
  for (const auto& weak : list)
    if (const auto unit = weak.lock()) names.push_back(unit->name());
  return names;
}

}  // namespace

ShardPlan::Unit Unit::describe(int gathers, int reductions) const {
  ShardPlan::Unit out;
  out.name = name();
  out.parameters = static_cast<std::int64_t>(shards_.parameters.size());
  std::map<DType, std::int64_t> stored;
  std::map<std::int64_t, std::int64_t> ragged;
  std::map<int, std::int64_t> along;
  for (const auto& p : shards_.parameters) {
    out.numel += p->shape.numel();
    out.shard_numel += round_up(p->spec.chunk_numel(), kAlignmentBytes / p->element_bytes());
    if (p->dtype != f32) stored[p->dtype] += p->shape.numel();
    if (p->spec.is_ragged() && shards_.size > 1) ragged[p->spec.block_rows] += p->shape.numel();
    if (p->spec.dim > 0) along[p->spec.dim] += p->shape.numel();
  }
  out.stored.assign(stored.begin(), stored.end());
  out.ragged.assign(ragged.begin(), ragged.end());
  out.along.assign(along.begin(), along.end());
  out.gather_bytes = out.wire_bytes = shards_.gather_bytes();
  for (const auto& p : shards_.parameters) {
    if (!p->transform) continue;
    out.wire_bytes -= UnitLayout::bytes_of(p->spec, p->compute_dtype);
    if (std::ranges::find(out.transforms, p->transform->name()) == out.transforms.end())
      out.transforms.emplace_back(p->transform->name());
  }
  if (shards_.has_buffer())
    out.gradient_buffer_bytes = out.reduced_bytes = shards_.layout.gradient_buffer_bytes;
  const auto copied = [](const ParameterState& p, DType dtype) {
    return p.spec.padded_numel() * static_cast<std::int64_t>(size_bytes(dtype));
  };
  for (const std::size_t i : shards_.layout.packed.entries) {
    const ParameterState& p = *shards_.parameters[i];
    ++out.packed_parameters;
    out.packed_bytes += copied(p, p.compute_dtype);
    out.wire_bytes -= UnitLayout::bytes_of(p.spec, p.compute_dtype);
  }
  for (const PieceLayout& piece : shards_.layout.pieces)
    for (const std::size_t entry : piece.packed.entries) {
      const ParameterState& p = *shards_.parameters[shards_.parameter_of[piece.first + entry]];
      ++out.packed_gradient_parameters;
      out.packed_gradient_bytes += copied(p, shards_.reduce_dtype());
      out.reduced_bytes -= UnitLayout::bytes_of(p.spec, shards_.reduce_dtype());
    }
  std::int64_t reduced = 0;  // what a reduction leaves on this rank
  if (buffer_)
    for (const GradientPiece& piece : buffer_->pieces()) {
      reduced += piece.shard_bytes();
      if (shards_.is_slice && !shards_.options.slices_wait) continue;  // it reduces all that comes
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
    out.post_forward_gathers = std::min(gathers, 1);  // the first that backward comes to
    for (const auto& p : shards_.parameters)
      out.post_forward_wire_bytes += UnitLayout::bytes_of(p->spec, p->compute_dtype);
  }
  if (shards_.size > 1) out.gathers_per_call = gathers;
  if (out.gradient_buffer_bytes > 0 && shards_.ranks() > 1 && shards_.reduces)
    out.reductions_per_call = reductions;
  if (shards_.replicas && shards_.all_reduces && reduced > 0) {
    out.all_reduces_per_call = out.reductions_per_call;
    out.all_reduce_bytes = reduced;
  }
  if (shards_.is_offloaded()) {
    out.copied_to_device_bytes = (gathers - out.post_forward_gathers) * copied_bytes(shards_);
    out.copied_to_host_bytes = shards_.reduces ? reductions * reduced : 0;
  }
  out.prefetch_depth = shards_.options.prefetch_depth;
  out.reductions_in_flight = shards_.options.reductions_in_flight;
  if (!shards_.is_slice) {  // whose calls are no module's
    const MixedPrecision& precision = shards_.options.precision;
    out.output = precision.output;
    out.casts_inputs = precision.cast_forward_inputs || !precision.param;
  }
  out.divide_factor = shards_.divide_factor;
  out.has_all_reduce_hook = !!shards_.hook;
  out.reshards_after_backward = control_.reshards_after_backward();
  out.forward_prefetch = names_of(control_.prefetch_list(UnitControl::Prefetch::forward));
  out.backward_prefetch = names_of(control_.prefetch_list(UnitControl::Prefetch::backward));
  return out;
}

}  // namespace tessera::shard

namespace tessera {

namespace {

std::string with_commas(std::int64_t n) { return tessera::with_commas(std::to_string(n)); }

std::string quoted(const std::vector<std::string>& names, std::size_t most) {
  std::string out;
  for (std::size_t i = 0; i < std::min(names.size(), most); ++i)
    out += concat(i > 0 ? ", '" : "'", names[i], "'");
  return names.size() > most ? concat(out, " and ", names.size() - most, " more") : out;
}

// What of a unit is not as it is by default. `ranks`: whose mean is taken then.
std::vector<std::string> settings(const ShardPlan::Unit& u, int ranks) {
  const ShardPlan::Unit plain;
  std::vector<std::string> out;
  const auto add = [&](bool applies, const auto&... parts) {
    if (applies) out.push_back(concat(parts...));
  };
  add(u.prefetch_depth != plain.prefetch_depth, "prefetch depth ", u.prefetch_depth);
  add(u.reductions_in_flight != plain.reductions_in_flight, u.reductions_in_flight,
      " reductions in flight");
  if (u.output) add(true, "output ", *u.output);
  add(!u.casts_inputs, "inputs not cast");
  add(u.divide_factor != ranks, "gradients divided by ", u.divide_factor);
  add(u.has_all_reduce_hook, "an all-reduce hook");
  add(!u.reshards_after_backward, "open after backward, counted as after an update");
  add(!u.forward_prefetch.empty(), "forward prefetches ",
      quoted(u.forward_prefetch, u.forward_prefetch.size()));
  add(!u.backward_prefetch.empty(), "backward prefetches ",
      quoted(u.backward_prefetch, u.backward_prefetch.size()));
  return out;
}

// Of a module that is one, under a root that is laid out by what is trainable now. Throws:
// ContractError for another module, naming `function`, and as Context::build.
std::shared_ptr<shard::Unit> root_unit(const char* function, nn::Module& root) {
  auto unit = std::dynamic_pointer_cast<shard::Unit>(root.hook());
  TESSERA_EXPECT(unit != nullptr, function, ": ", shard::called(root),
                 " is not a unit; call fully_shard on it first");
  if (!unit->context())
    shard::Context::build(root);
  else if (unit->shards().is_root() && !unit->calls().is_running())
    unit->context()->follow_masks(root);
  return unit;
}

ShardPlan plan_of(const nn::Module& root, const shard::Context& context) {
  ShardPlan plan = context.plan();
  for (const Parameter& p : root.parameters())
    if (!state_of(p)->unit) {
      ++plan.ignored_parameters;
      plan.ignored_numel += p.shape().numel();
    }
  return plan;
}

}  // namespace

ShardPlan shard_plan(nn::Module& root) {
  return plan_of(root, *root_unit("shard_plan", root)->context());
}

ShardPlan shard_plan(nn::Module& root,
                     const std::function<std::shared_ptr<nn::Module>(World&)>& step) {
  const std::shared_ptr<shard::Unit> unit = root_unit("shard_plan", root);
  shard::Context& context = *unit->context();
  TESSERA_EXPECT(unit->shards().is_root() && !context.has_run(), "shard_plan: unit '", unit->name(),
                 unit->shards().is_root()
                     ? "' has run, or been planned so; do it once, before the first step"
                     : "' is no root; plan a step of the root's");
  const World& world = unit->shards().options.mesh.world();
  World planned = World::emulated(
      world.rank(), world.size(),
      {.device = {.kind = context.device().kind()}, .executor = ExecutorKind::virtual_});
  const autograd::RandomStateGuard as_before(autograd::random_state());
  const std::shared_ptr<nn::Module> model = step(planned);
  TESSERA_EXPECT(model != nullptr, "shard_plan: the step returned no model");
  const auto* const found = dynamic_cast<const shard::Unit*>(model->hook().get());
  TESSERA_EXPECT(found && found->shards().options.mesh.world().device() == planned.device(),
                 "shard_plan: the step's model is no unit of the world that the step was given; "
                 "make and shard another one there");
  context.follow_plan(*root_unit("shard_plan", *model)->context());
  return plan_of(root, context);
}

ShardCounters shard_counters(nn::Module& root) {
  return root_unit("shard_counters", root)->context()->counters();
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
  std::int64_t gathers = 0, reductions = 0, gathered = 0, reduced = 0, all_reduces = 0, summed = 0;
  std::int64_t packed = 0, unpacked_bytes = 0, packed_bytes = 0;
  std::map<int, std::pair<int, std::int64_t>> among;  // so many ranks: gathers, their bytes
  for (const Unit& u : units) {
    const std::int64_t near = u.post_forward_gathers * u.post_forward_wire_bytes;
    gathers += u.gathers_per_call;
    reductions += u.reductions_per_call;
    gathered += (u.gathers_per_call - u.post_forward_gathers) * u.wire_bytes + near;
    reduced += u.reductions_per_call * u.reduced_bytes;
    all_reduces += u.all_reduces_per_call;
    summed += u.all_reduces_per_call * u.all_reduce_bytes;
    packed += std::max<std::int64_t>(u.packed_parameters, u.packed_gradient_parameters);
    unpacked_bytes += (u.gathers_per_call - u.post_forward_gathers) * u.packed_bytes;
    packed_bytes += u.reductions_per_call * u.packed_gradient_bytes;
    if (u.post_forward_gathers == 0) continue;
    among[u.post_forward_ranks].first += u.post_forward_gathers;
    among[u.post_forward_ranks].second += near;
  }
  out += concat("  collectives of one forward and backward: ", gathers, " all-gathers of ",
                with_commas(gathered), " bytes, ", reductions, " reduce-scatters of ",
                with_commas(reduced), " bytes\n");
  for (const auto& [k, of] : among)
    out += concat("  of them ", of.first, " all-gathers of ", with_commas(of.second),
                  " bytes are over ", k, " ranks\n");
  if (packed > 0)
    out += concat("  ", packed, " small tensors travel packed: ", with_commas(unpacked_bytes),
                  " bytes copied out of the all-gathers, ", with_commas(packed_bytes),
                  " into the reduce-scatters\n");
  if (all_reduces > 0)
    out += concat("  over replicas ", all_reduces, " all-reduces of ", with_commas(summed),
                  " bytes\n");
  for (const Unit& u : units)
    for (const auto& [rows, numel] : u.ragged)
      out += concat("  '", u.name, "' shards ", with_commas(numel), " elements by blocks of ", rows,
                    rows == 1 ? " row" : " rows", ", which travel by counts\n");
  for (const Unit& u : units)
    for (const auto& [dim, numel] : u.along)
      out += concat("  '", u.name, "' shards ", with_commas(numel), " elements along dimension ",
                    dim, "\n");
  for (const Unit& u : units)
    for (const auto& [dtype, numel] : u.stored)
      out += concat("  '", u.name, "' stores and gathers ", with_commas(numel),
                    " frozen elements as ", dtype, "\n");
  for (const Unit& u : units)
    for (const std::string& name : u.transforms)
      out += concat("  '", u.name, "' gathers by '", name, "': ", with_commas(u.wire_bytes),
                    " bytes of a slot of ", with_commas(u.gather_bytes), "\n");
  if (ignored_parameters > 0)
    out += concat("  ignored: ", ignored_parameters, " tensors of ", with_commas(ignored_numel),
                  " elements, whole on each rank, their gradients left to the program\n");
  std::map<std::string, std::vector<std::string>> set_for;  // units
  std::map<std::vector<std::string>, std::string> said_of;  // what the same units have
  for (const Unit& u : units)
    for (const std::string& setting : settings(u, ranks * replicas))
      set_for[setting].push_back(u.name);
  for (const auto& [setting, names] : set_for) {
    std::string& said = said_of[names];
    said += concat(said.empty() ? "" : ", ", setting);
  }
  for (const auto& [names, said] : said_of)
    out += concat("  ",
                  names.size() > 1 && names.size() == units.size() ? "all units" : quoted(names, 3),
                  ": ", said, "\n");
  if (forwards_ahead != ShardPlan().forwards_ahead)
    out += concat("  the host is ", forwards_ahead, forwards_ahead == 1 ? " forward" : " forwards",
                  " ahead at most\n");
  std::int64_t kept = 0, held = 0, postponed = 0, to_device = 0, to_host = 0;
  for (const Unit& u : units) {
    to_device += u.copied_to_device_bytes;
    to_host += u.copied_to_host_bytes;
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
                  with_commas(offload_host_bytes), " on the host\n  offload: copies of ",
                  with_commas(to_device), " bytes to the device, of ", with_commas(to_host),
                  " back, in one forward and backward\n");
  return out;
}

}  // namespace tessera
