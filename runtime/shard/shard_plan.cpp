// What a sharded model will do, as numbers and as a table.
#include <algorithm>
#include <cstdio>
#include <map>

#include "runtime/shard/unit.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/detail/base/text.hpp"

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
// ContractError for another module, naming `function`, and as Root::build.
std::shared_ptr<shard::Unit> root_unit(const char* function, nn::Module& module) {
  auto unit = std::dynamic_pointer_cast<shard::Unit>(module.hook());
  TESSERA_EXPECT(unit != nullptr, function, ": ", shard::called(module),
                 " is not a unit; call fully_shard on it first");
  if (!unit->root())
    shard::Root::build(module);
  else if (unit->shards().is_root() && !unit->calls().is_running())
    unit->root()->follow(module);
  return unit;
}

ShardPlan plan_of(const nn::Module& module, const shard::Root& root) {
  ShardPlan plan = root.describe();
  for (const Parameter& p : module.parameters())
    if (!state_of(p)->unit) {
      ++plan.ignored_parameters;
      plan.ignored_numel += p.shape().numel();
    }
  return plan;
}

}  // namespace

ShardPlan shard_plan(nn::Module& module) {
  return plan_of(module, *root_unit("shard_plan", module)->root());
}

ShardPlan shard_plan(nn::Module& module,
                     const std::function<std::shared_ptr<nn::Module>(World&)>& step) {
  const std::shared_ptr<shard::Unit> unit = root_unit("shard_plan", module);
  shard::Root& of = *unit->root();
  TESSERA_EXPECT(
      unit->shards().is_root() && !of.has_run(), "shard_plan: unit '", unit->name(),
      unit->shards().is_root()
          ? "' has run, or was already planned by a step; plan once, before the first step"
          : "' is no root; plan a step of the root");
  const World& world = unit->shards().options().mesh.world();
  World planned =
      World::emulated(world.rank(), world.size(),
                      {.device = {.kind = of.device().kind()}, .executor = ExecutorKind::virtual_});
  const autograd::RandomStateGuard as_before(autograd::random_state());
  const std::shared_ptr<nn::Module> model = step(planned);
  TESSERA_EXPECT(model != nullptr,
                 "shard_plan: the step returned no model; return the model that it calls");
  const auto* const found = dynamic_cast<const shard::Unit*>(model->hook().get());
  TESSERA_EXPECT(found && found->shards().options().mesh.world().device() == planned.device(),
                 "shard_plan: the model of the step is no unit of the world that the step was "
                 "given; make and shard a model there");
  of.follow_slots_of(*root_unit("shard_plan", *model)->root());
  return plan_of(module, of);
}

ShardCounters shard_counters(nn::Module& root) {
  return root_unit("shard_counters", root)->root()->counters();
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
    for (const auto& [dtype, numel] : u.overridden)
      out += concat("  '", u.name, "' gathers ", with_commas(numel), " elements as ", dtype,
                    ", by param_override_fn\n");
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
  if (symmetric_gradient_bytes > 0)
    out += concat("  gradients in ", with_commas(symmetric_gradient_bytes),
                  " bytes of symmetric memory\n");
  if (offload_device_bytes > 0)
    out += concat("  offload: shards, their gradients and moments on the host; staging ",
                  with_commas(offload_device_bytes), " bytes on the device, ",
                  with_commas(offload_host_bytes), " on the host\n  offload: copies of ",
                  with_commas(to_device), " bytes to the device, of ", with_commas(to_host),
                  " back, in one forward and backward\n");
  return out;
}

}  // namespace tessera
