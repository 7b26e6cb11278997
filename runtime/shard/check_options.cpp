// What ShardOptions may say, and of which parameters, and that these have memory.
#include <algorithm>

#include "runtime/shard/unit.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera::shard {
namespace {

std::string some_names(const UnitShards& shards) {
  constexpr std::size_t kShown = 5;
  std::string names;
  std::size_t n = 0;
  for (const auto& part : {shards.parameters, shards.streamed})
    for (const auto& p : part)
      if (++n <= kShown) names += concat(n > 1 ? ", '" : "'", p->name, "'");
  return n > kShown ? concat(names, " and ", n - kShown, " more") : names;
}

void expect_memory(const UnitShards& shards, const std::string& unit) {
  TESSERA_EXPECT(shards.is_materialized() || shards.is_empty(), "unit '", unit,
                 "' has no memory yet for ", some_names(shards),
                 "; call materialize on the model first");
}

}  // namespace

void check_options(const ShardOptions& options, const std::string& of) {
  try {
    options.mesh.shard_group();
  } catch (const ContractError& error) {  // of three dimensions, or without this rank
    throw ContractError(concat("fully_shard: ", of, ": ", error.what()));
  }
  const auto check = [&](const char* what, const std::optional<DType>& dtype) {
    TESSERA_EXPECT(!dtype || *dtype == f32 || *dtype == bf16 || *dtype == f16, "fully_shard: ", of,
                   ": ", what, " is ", *dtype, "; expected f32, bf16 or f16");
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
    expect(!state->unit, ", which belongs to unit '", state->unit ? *state->unit : "",
           "' already; ignore it there, too");
    expect(options.offload == Offload::none,
           " while others are offloaded; leave ShardOptions::ignored or offload out");
    expect(!state->group,
           ", which lies in memory with others; shard a model before it is materialized, or build "
           "it on meta");
    expect(state->block_rows == 0 && !state->transform, ", which has ",
           state->transform ? "a gather transform" : "blocks of rows",
           " while every rank has it whole; leave one of both out");
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
  const auto in_memory =
      std::ranges::count_if(claimed, [](const auto& state) { return state->group != nullptr; });
  TESSERA_EXPECT(in_memory == 0 || in_memory == std::ssize(claimed), "fully_shard: ", of, ": ",
                 in_memory, " of ", claimed.size(),
                 " parameters have memory; materialize all of them or none");
}

void check_under_root(const UnitShards& unit, const std::string& name, const UnitShards& root) {
  expect_memory(unit, name.empty() ? "(root)" : name);
  const DeviceMesh &mesh = unit.options.mesh, &of_root = root.options.mesh;
  TESSERA_EXPECT(&mesh.shard_group() == &of_root.shard_group() &&
                     mesh.replicate_group() == of_root.replicate_group(),
                 "fully_shard: unit '", name,
                 "' lies on another mesh than its root; give all units of a model one mesh");
  TESSERA_EXPECT(unit.options.offload == root.options.offload, "fully_shard: unit '", name,
                 "' has its shards on the ", unit.is_offloaded() ? "host" : "device",
                 ", its root on the ", unit.is_offloaded() ? "device" : "host",
                 "; give all units of a model one ShardOptions::offload");
}

}  // namespace tessera::shard

namespace tessera {

std::string Reshard::to_string() const {
  static constexpr const char* kNames[] = {"automatic", "always", "never"};
  return is_partial() ? concat("to(", ranks_, ')') : kNames[static_cast<int>(kind_)];
}

}  // namespace tessera
