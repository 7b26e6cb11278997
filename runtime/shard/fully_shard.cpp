#include "tessera/shard/fully_shard.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_agreement.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

namespace shard {

std::string called(const nn::Module& module) {
  const auto parameters = module.named_parameters();
  return parameters.empty() ? "the module without parameters"
                            : concat("the module of '", parameters.front().second.name(), "'");
}

void check_reshard(const char* function, const std::string& unit, Reshard reshard,
                   const DeviceMesh& mesh,
                   std::span<const std::shared_ptr<ParameterState>> parameters) {
  if (!reshard.is_partial()) return;
  const int k = reshard.ranks(), ranks = mesh.shard_size(),
            others = mesh.world().size() - mesh.size();
  TESSERA_EXPECT(k > 1 && k < ranks && ranks % k == 0, function, ": ", unit, ": Reshard::", reshard,
                 " does not split the ", ranks, ranks == 1 ? " rank" : " ranks",
                 " that shard; give a divisor above 1 and below ", ranks);
  TESSERA_EXPECT(others == 0, function, ": ", unit, ": Reshard::", reshard,
                 " needs all ranks of the world, but ", others,
                 " are not in the mesh; use Reshard::always");
  for (const auto& p : parameters)
    TESSERA_EXPECT(p->block_rows == 0, function, ": ", unit, ": Reshard::", reshard,
                   " needs even shards, but '", p->name, "' is sharded by blocks of ",
                   p->block_rows, " rows; use Reshard::always, or leave set_block_rows out");
}

namespace {

// --- what options may say, and of which parameters ---

bool is_taken(DType dtype) { return dtype == f32 || dtype == bf16 || dtype == f16; }

void check_options(const ShardOptions& options, const std::string& of) {
  try {
    options.mesh.shard_group();
  } catch (const ContractError& error) {  // of too many dimensions, or without this rank
    throw ContractError(concat("fully_shard: ", of, ": ", error.what()));
  }
  const auto check = [&](const char* what, const std::optional<DType>& dtype) {
    TESSERA_EXPECT(!dtype || is_taken(*dtype), "fully_shard: ", of, ": ", what, " is ", *dtype,
                   "; expected f32, bf16 or f16");
  };
  const auto check_number = [&](const char* what, std::int64_t number, std::int64_t least,
                                std::optional<std::int64_t> most = {}) {
    TESSERA_EXPECT(number >= least && (!most || number <= *most), "fully_shard: ", of, ": ", what,
                   " is ", number, "; expected ", least,
                   most ? concat(" to ", *most) : std::string(" or more"));
  };
  check("precision.param", options.precision.param);
  check("precision.reduce", options.precision.reduce);
  check("precision.output", options.precision.output);
  check_number("prefetch_depth", options.prefetch_depth, 1, 64);
  check_number("reductions_in_flight", options.reductions_in_flight, 1, 64);
  check_number("forwards_ahead", options.forwards_ahead, 1, 64);
  check_number("piece_bytes", options.piece_bytes, 1);
  check_number("packed_bytes", options.packed_bytes, 0);
  check_number("slice_bytes", options.slice_bytes, 0);
  const DType param = options.precision.param.value_or(f32),
              reduce = options.precision.reduce.value_or(f32);
  TESSERA_EXPECT(reduce == f32 || reduce == param, "fully_shard: ", of, ": gradients of ", param,
                 " parameters cannot be reduced in ", reduce, "; use f32",
                 param == f32 ? "" : concat(" or ", param));
  for (const Parameter& p : options.ignored) {
    TESSERA_EXPECT(p.defined(), "fully_shard: ", of,
                   ": ShardOptions::ignored has an undefined parameter; leave it out");
    const auto& state = state_of(p);
    const auto expect = [&](bool holds, const auto&... why) {
      TESSERA_EXPECT(holds, "fully_shard: ", of, " ignores ", state->called(), why...);
    };
    expect(!state->unit, ", which already belongs to unit '", state->unit ? *state->unit : "",
           "'; ignore it there, too");
    expect(options.offload == Offload::none,
           " while others are offloaded; leave ShardOptions::ignored or offload out");
    expect(!state->group || state->is_ignored,  // as where the unit is made anew
           ", which lies in memory with others; shard a model before it is materialized, or build "
           "it on meta");
    expect(state->block_rows == 0 && !state->transform, ", which has ",
           state->transform ? "a gather transform" : "blocks of rows",
           " but is whole on every rank; leave one of the two out");
  }
}

int dim_of(const Parameter& parameter, const ShardOptions& options, const std::string& of) {
  if (!options.shard_placement_fn) return 0;
  const ParameterState& state = *state_of(parameter);
  const Shape& shape = state.shape;
  const int given = options.shard_placement_fn(parameter).dim, ranks = options.mesh.shard_size(),
            dim = given < 0 ? given + shape.ndim() : given;
  if (dim == 0) return 0;
  const auto expect = [&](bool holds, const auto&... why) {
    TESSERA_EXPECT(holds, "fully_shard: ", of, ": shard_placement_fn gives Shard(", given, ") for ",
                   state.described(), why...);
  };
  expect(dim > 0 && dim < shape.ndim(),
         ", which has no such dimension; give Shard(0), or another of its dimensions");
  expect(shape[dim] % ranks == 0, ", whose ", shape[dim], " do not divide over ", ranks,
         " ranks; give Shard(0), the one dimension that is cut unevenly");
  expect(state.block_rows == 0 && !state.transform, ", which has ",
         state.transform ? "a gather transform" : "blocks of rows",
         ", of dimension 0; give Shard(0)");
  return dim;
}

std::optional<DType> override_of(const Parameter& parameter, const MixedPrecision& precision,
                                 const std::string& of) {
  if (!precision.param_override_fn) return {};
  const std::optional<DType> own = precision.param_override_fn(parameter);
  if (!own) return {};
  const DType reduce = precision.reduce.value_or(f32);
  TESSERA_EXPECT(is_taken(*own), "fully_shard: ", of, ": precision.param_override_fn gives ", *own,
                 " for ", state_of(parameter)->described(), "; give f32, bf16, f16 or nothing");
  TESSERA_EXPECT(reduce == f32 || reduce == *own, "fully_shard: ", of,
                 ": precision.param_override_fn gives ", *own, " for ",
                 state_of(parameter)->described(), ", whose gradient can't be reduced in ", reduce,
                 "; leave precision.reduce at f32");
  return own;
}

// How a parameter is claimed.
struct Claim {
  int dim;  // along which it is sharded
  std::optional<DType> override_dtype;
};

void check_claimed(const std::vector<std::shared_ptr<ParameterState>>& claimed,
                   const ShardOptions& options, const std::string& of) {
  for (const auto& state : claimed) {
    if (state->transform)
      state->transform->parts({state->shape, options.mesh.shard_size(), options.mesh.shard_rank()});
    TESSERA_EXPECT(state->block_rows == 0 || !state->may_be_streamed(), "fully_shard: ", of,
                   ": parameter '", state->name,
                   "' is streamed, in even slices; leave set_block_rows(", state->block_rows,
                   ") out");
  }
  check_reshard("fully_shard", of, options.reshard_after_forward, options.mesh, claimed);
}

// --- the unit ---

// The unit of these modules, which is to be made anew; null where they have none.
std::shared_ptr<Unit> made_before(const std::vector<nn::Module*>& modules,
                                  const ShardOptions& options, const std::string& of) {
  const auto& hook = modules.front()->hook();
  if (!hook) return nullptr;
  const auto unit = std::dynamic_pointer_cast<Unit>(hook);
  const auto is_new = [](const Parameter& p) { return !p.unit() && !state_of(p)->is_ignored; };
  bool has_new = std::ranges::any_of(options.ignored, is_new);
  for (const nn::Module* const module : modules)
    has_new = has_new || std::ranges::any_of(module->parameters(), is_new);
  TESSERA_EXPECT(unit && has_new, "fully_shard: ", of,
                 " is a unit already; call fully_shard once on each module");
  TESSERA_EXPECT(
      unit->calls().is_of(modules), "fully_shard: ", of,
      " has new parameters, but is in a unit of other modules; give all modules of that unit");
  TESSERA_EXPECT(
      !autograd::in_backward() && !autograd::in_call() && !unit->calls().is_running(),
      "fully_shard: ", of,
      " has new parameters, but is in a call or a backward pass; call fully_shard between steps");
  const DeviceMesh &now = options.mesh, &then = unit->shards().options().mesh;
  TESSERA_EXPECT(&now.shard_group() == &then.shard_group() &&
                     now.replicate_group() == then.replicate_group() &&
                     options.offload == unit->shards().options().offload,
                 "fully_shard: ", of,
                 " has new parameters, but is given another mesh or offload than it has; give the "
                 "ones that it has");
  return unit;
}

// Of modules of which none lies inside of another.
void make_unit(const std::vector<nn::Module*>& modules, const ShardOptions& options) {
  const std::string of = called(*modules.front());
  check_options(options, of);
  const std::shared_ptr<Unit> before = made_before(modules, options, of);
  std::vector<std::shared_ptr<ParameterState>> claimed;
  std::vector<Claim> claims_of;  // of each
  std::vector<Unit*> inside;
  for (nn::Module* const module : modules)
    for (const auto& [name, below] : module->named_modules())
      if (auto* const unit = dynamic_cast<Unit*>(below->hook().get());
          unit && unit != before.get()) {
        expect_one_mesh(name, unit->shards().options().mesh, options.mesh);
        inside.push_back(unit);
      }
  const auto is_inside = [&](const std::string* unit) {
    return std::ranges::any_of(inside, [&](const Unit* inner) { return &inner->name() == unit; });
  };
  std::unordered_set<const ParameterState*> ignored, known;  // two modules may share one
  for (const Parameter& p : options.ignored) ignored.insert(state_of(p).get());
  bool is_read = false;  // in backward
  for (const nn::Module* const module : modules) {
    std::size_t claims = 0, own = 0;
    for (const auto& [name, parameter] : module->own_parameters())
      own += ignored.contains(state_of(parameter).get()) ? 0 : 1;
    for (const auto& [name, parameter] : module->named_parameters()) {
      const auto& state = state_of(parameter);
      if (ignored.contains(state.get())) continue;
      TESSERA_EXPECT(!state->is_ignored, "fully_shard: parameter '", name,
                     "' is ignored by a unit inside of ", of,
                     "; give this unit the same ShardOptions::ignored");
      const bool is_kept = before && state->unit == &before->name();
      if (state->unit && !is_kept) {
        TESSERA_EXPECT(is_inside(state->unit), "fully_shard: parameter '", name,
                       "' belongs to unit '", *state->unit,
                       "' already; shard inner modules before outer ones; where two modules share "
                       "a parameter, shard them as one list, or the module that holds both");
        continue;
      }
      ++claims;
      if (!known.insert(state.get()).second) continue;
      claimed.push_back(state);
      claims_of.push_back(
          {dim_of(parameter, options, of), override_of(parameter, options.precision, of)});
    }
    // A module below this one may be called again inside of this one's call.
    is_read = is_read || module->reads_parameters_in_backward() || claims > own;
  }
  check_claimed(claimed, options, of);  // before anything has changed
  const auto in_memory =
      std::ranges::count_if(claimed, [](const auto& state) { return state->group != nullptr; });
  TESSERA_EXPECT(before || in_memory == 0 || in_memory == std::ssize(claimed), "fully_shard: ", of,
                 ": ", in_memory, " of ", claimed.size(),
                 " parameters have memory; materialize all of them or none");
  if (before) {
    // Those that it had come first, so that blocks of rows are dealt as they were.
    const auto is_kept = [&](std::size_t i) { return claimed[i]->unit != nullptr; };
    std::vector<std::size_t> order(claimed.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_partition(order, is_kept);
    for (const std::size_t i : order)
      TESSERA_EXPECT(!is_kept(i) || claimed[i]->spec.dim == claims_of[i].dim,
                     "fully_shard: parameter '", claimed[i]->name, "' of ", of,
                     " was sharded along dimension ", claimed[i]->spec.dim,
                     ", and is now to be along ", claims_of[i].dim,
                     "; give the same shard_placement_fn again");
    const auto states = std::exchange(claimed, {});
    const auto of_states = std::exchange(claims_of, {});
    for (const std::size_t i : order)
      claimed.push_back(states[i]), claims_of.push_back(of_states[i]);
    before->let_go();
  }
  // Values that exist move from their whole arrays into the shards.
  struct OldValues {
    std::shared_ptr<ParameterState> state;
    Tensor values;
    bool is_whole;
  };
  std::vector<OldValues> old;
  Device device = Device::meta();
  for (const nn::Module* const module : modules)
    for (const Parameter& p : module->parameters())  // also of what inner units have
      if (!p.device().is_meta()) device = p.device().main();
  for (const auto& state : claimed) {
    if (!state->group) continue;
    ++state->group->layouts;  // for optimizers
    old.push_back({state, state->rows(), !before || !state->mesh});
    state->group = nullptr;
  }
  std::vector<const nn::Module*> list;
  if (modules.size() > 1) list.assign(modules.begin(), modules.end());
  ShardOptions kept = options;
  kept.ignored.clear(), kept.shard_placement_fn = {};  // a unit holds nothing of others
  kept.precision.param_override_fn = {};
  for (std::size_t i = 0; i < claimed.size(); ++i) {
    claimed[i]->spec.dim = claims_of[i].dim;
    claimed[i]->override_dtype = claims_of[i].override_dtype;
  }
  auto unit = std::make_shared<Unit>(claimed, kept, is_read, std::move(list));
  for (const Parameter& p : options.ignored) state_of(p)->is_ignored = true;
  for (nn::Module* const module : modules) {
    if (before) module->set_hook(nullptr);
    module->set_hook(unit);
  }
  if (before && before->is_inner()) unit->set_inner();
  note_made(unit, modules);
  for (Unit* const inner : inside) inner->set_inner();
  if (device.is_meta() || (old.empty() && !claimed.empty())) return;
  unit->materialize(device);
  for (const auto& [state, values, is_whole] : old) {
    if (const Tensor rows = state->rows(); rows.numel() > 0)
      raw::copy_into(rows, is_whole ? rows_of(values, state->spec) : values);
    state->group->mark_edited();
  }
}

}  // namespace

}  // namespace shard

namespace {

// Those that lie inside of no other.
std::vector<nn::Module*> outermost(const std::vector<nn::Module*>& modules) {
  TESSERA_EXPECT(!modules.empty(), "fully_shard: the list of modules is empty; give one or more");
  std::unordered_set<const nn::Module*> listed, inside;
  const bool are_one = std::ranges::all_of(modules, [&](const nn::Module* module) {
    return module && modules[0] && module->hook() == modules[0]->hook();
  });
  for (std::size_t i = 0; i < modules.size(); ++i) {
    nn::Module* const module = modules[i];
    TESSERA_EXPECT(module != nullptr, "fully_shard: module ", i,
                   " of the list is a null pointer; give the addresses of modules");
    TESSERA_EXPECT(listed.insert(module).second, "fully_shard: module ", i, " of the list, ",
                   shard::called(*module), ", is there already; give each once");
    // Or all are one, which takes in what was registered since.
    TESSERA_EXPECT(!module->hook() || are_one, "fully_shard: module ", i, " of the list, ",
                   shard::called(*module),
                   ", is a unit already; call fully_shard once on each module");
    for (const auto& [name, below] : module->named_modules())
      if (below != module) inside.insert(below);
  }
  std::vector<nn::Module*> out;
  std::copy_if(modules.begin(), modules.end(), std::back_inserter(out),
               [&](const nn::Module* module) { return !inside.contains(module); });
  return out;
}

}  // namespace

void fully_shard(nn::Module& module, const ShardOptions& options, Caller at) {
  const CallSite site(at);
  shard::make_unit({&module}, options);
}

void fully_shard(const std::vector<nn::Module*>& modules, const ShardOptions& options, Caller at) {
  const CallSite site(at);
  shard::make_unit(outermost(modules), options);
}

}  // namespace tessera
