// Small chunks travel packed: fewer items, the same bits.
#include <algorithm>

#include "tessera/comm/flight_recorder.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// One unit of all kinds of parameters: of 3 ranks the gain, biases and the row have small chunks.
class PackedUnit final : public nn::Module {
 public:
  PackedUnit() : up(24, 40), down(40, 24), gain({24}, Initializer::normal(1, 0.1)) {
    register_module("up", up);
    register_module("down", down);
    register_parameter("gain", gain);
    register_parameter("row", row);
    register_parameter("offset", offset);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const Tensor scale = gain.value();
      const Tensor y = down(tanh(up(cast(x, scale.dtype()) * scale))) + offset.value();
      return uses_row ? y * row.value() : y;
    });
  }
  nn::Linear up, down;
  Parameter gain, row{{1, 24}, Initializer::normal(1, 0.1)},
      offset{{}, Initializer::normal(1, 0.1)};
  bool uses_row = true;
};

struct PackedWay {
  const char* called;
  std::vector<int> ranks = {2, 3, 4};
  std::function<void(ShardOptions&)> change = [](ShardOptions&) {};
  int replicas = 1;
  bool encodes = false, has_blocks = false, freezes = false, skips = false, accumulates = false;
};

std::vector<PackedWay> packed_ways() {
  const auto columns = [](const Parameter& p) {
    return Shard{p.shape().ndim() == 2 && p.shape()[0] > 1 ? 1 : 0};
  };
  return {{.called = "plain"},
          {.called = "bf16", .change = [](auto& o) { o.precision.param = bf16; }},
          {.called = "bf16 on the wire",
           .change = [](auto& o) { o.precision = {.param = bf16, .reduce = bf16}; }},
          {.called = "replicas", .ranks = {4}, .replicas = 2},
          {.called = "parts after forward",
           .ranks = {4},
           .change = [](auto& o) { o.reshard_after_forward = Reshard::to(2); }},
          {.called = "offload", .change = [](auto& o) { o.offload = Offload::cpu; }},
          {.called = "pieces", .change = [](auto& o) { o.piece_bytes = 24 * 40 * 4; }},
          {.called = "columns",
           .ranks = {2, 4},
           .change = [columns](auto& o) { o.shard_placement_fn = columns; }},
          {.called = "transforms", .encodes = true},
          {.called = "blocks of rows", .has_blocks = true},
          {.called = "frozen, and thawed", .freezes = true},
          {.called = "a row that one rank leaves out", .skips = true},
          {.called = "two backwards", .accumulates = true}};
}

struct PackedRun {
  Values weights;
  std::map<std::string, float> counts;
  std::int32_t gathered_items = 0, reduced_items = 0;
};

PackedRun train_packed(World& world, const PackedWay& way, std::int64_t packed_bytes,
                       std::uint64_t seed) {
  PackedUnit model;
  if (way.encodes) model.up.weight.set_gather_transform(gather_in_e4m3());
  if (way.has_blocks) {
    model.up.weight.set_block_rows(3);
    model.row.set_block_rows(1);
  }
  ShardOptions options{.mesh = mesh_of(world, way.replicas), .packed_bytes = packed_bytes};
  way.change(options);
  fully_shard(model, options);
  nn::init(model, {seed}, world.device());
  optim::SGD optimizer(model.parameters(), {.lr = 1e-3});
  const Tensor x = positive_rows(seed, world.rank() * 2, 2, 24, world.device());
  PackedRun out;
  for (int step = 0; step < 4; ++step) {
    if (way.freezes && step != 1) model.down.bias.set_trainable(step != 0);
    if (way.freezes && step == 2) model.gain.freeze();
    model.uses_row = !way.skips || world.rank() != 1;
    for (int micro = 0; micro < (way.accumulates ? 2 : 1); ++micro)
      mean_square(model(x)).backward();
    out.counts = arrival_counts(model);
    optimizer.step();
    optimizer.zero_grad();
  }
  world.device().synchronize();
  const FlightRecorder& recorder = options.mesh.shard_group().flight_recorder();
  FlightEntry entry;
  for (std::uint64_t seq = 1; seq <= recorder.last_submitted(); ++seq) {
    if (!recorder.find(seq, entry)) continue;
    const std::string_view name = entry.name;
    if (name.starts_with("all_gather")) out.gathered_items += entry.n_items;
    if (name.starts_with("reduce_scatter")) out.reduced_items += entry.n_items;
  }
  out.weights = full_values(model);
  return out;
}

// The kernels that copy, and the collectives, of one forward and backward.
struct PackedCopies final : Observer {
  void launched(StreamId, Tick, const Op& op) override {
    const std::string_view name = op.name;
    if (name == "unpack_chunks") ++out, out_bytes += op.cost.bytes / 2;
    if (name == "pack_chunks") ++in, in_bytes += op.cost.bytes / 2;
    if (name.starts_with("all_gather")) ++gathers;
    if (name.starts_with("reduce_scatter")) ++reductions;
  }
  int out = 0, in = 0, gathers = 0, reductions = 0;
  double out_bytes = 0, in_bytes = 0;
};

}  // namespace

TEST_CASE("small chunks that travel packed give the bits of those that travel alone", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  for (const PackedWay& way : packed_ways())
    for (const int ranks : way.ranks) {
      INFO(way.called << " on " << ranks << " ranks, seed " << seed);
      const auto run = [&](std::int64_t packed_bytes) {
        return on_ranks(ranks, [&](World& w) { return train_packed(w, way, packed_bytes, seed); });
      };
      const std::vector<PackedRun> packed = run(64), alone = run(0);
      for (std::size_t rank = 0; rank < packed.size(); ++rank) {
        CHECK(same_bits(packed[rank].weights, alone[rank].weights));
        CHECK(packed[rank].counts == alone[rank].counts);
        CHECK(packed[rank].gathered_items < alone[rank].gathered_items);
        CHECK(packed[rank].reduced_items < alone[rank].reduced_items);
      }
    }
}

TEST_CASE("a plan says what is copied for small chunks, and a step copies that", "[threads]") {
  for (const auto& [plan, seen] : on_ranks(3, [](World& world) {
         PackedUnit model;
         fully_shard(
             model,
             {.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}, .packed_bytes = 64});
         nn::init(model, {1}, world.device());
         const ShardPlan plan = shard_plan(model);
         const Tensor x = positive_rows(3, world.rank() * 2, 2, 24, world.device());
         PackedCopies seen;
         world.device().synchronize();  // an observer comes and goes while the device is idle
         world.device().context().add_observer(seen);
         mean_square(model(x)).backward();
         world.device().synchronize();
         world.device().context().remove_observer(seen);
         return std::pair(plan, seen);
       })) {
    // Of 24, 40, 1 row of 24 in each chunk, 24 and 1 elements: the row's chunk is larger than 16.
    constexpr std::int64_t kPadded = 24 + 42 + 24 + 3;
    const ShardPlan::Unit& unit = plan.units[0];
    CHECK(unit.packed_parameters == 4);
    CHECK(unit.packed_gradient_parameters == 4);
    CHECK(unit.packed_bytes == kPadded * 2);
    CHECK(unit.packed_gradient_bytes == kPadded * 4);
    CHECK(seen.out == seen.gathers);
    CHECK(seen.in == seen.reductions);
    CHECK(seen.out_bytes == static_cast<double>(unit.packed_bytes * seen.gathers));
    CHECK(seen.in_bytes == static_cast<double>(unit.packed_gradient_bytes * seen.reductions));
    CHECK_THAT(plan.to_string(),
               Contains("\n  4 small tensors travel packed: 186 bytes copied out of the "
                        "all-gathers, 372 into the reduce-scatters\n"));
  }
}

TEST_CASE("chunks that alignment would swell are not packed") {
  const World world = World::emulated(0, 512, {.executor = ExecutorKind::virtual_});
  Stack stack({4, 4, 4});
  stack.shard({.mesh = DeviceMesh::flat(world)});
  stack.materialize(world.device());
  for (const ShardPlan::Unit& unit : shard_plan(stack).units) {
    CHECK(unit.packed_gradient_parameters == 0);
    CHECK(unit.gradient_buffer_bytes == unit.reduced_bytes);
  }
}
