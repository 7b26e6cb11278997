// What shard_plan says beside its table, each line on a small model with its numbers by hand. Of
// f32 each parameter begins at a multiple of 64 elements, 256 bytes.
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// A unit has two parameters: the layers [5, 4] with 5, and [3, 5] with 3; the root 3 and a scalar.
const std::vector<std::int64_t> kPlanned = {4, 5, 3};

Tensor planned_loss(Stack& stack, const World& world) {
  return mean_square(stack(rows_of(1, 2 * world.rank(), 2, 4, world.device())));
}

// What lies below the table.
std::string below_table(const ShardPlan& plan) {
  const std::string text = plan.to_string();
  return text.substr(text.find("  collectives of one forward"));
}

struct PlannedAndDone {
  ShardPlan plan;
  ShardCounters counters;  // of one step
  double to_device = 0, to_host = 0;
};

// Bytes of the copies that are submitted.
struct SeenCopies final : Observer {
  void launched(StreamId, Tick, const Op& op) override {
    const double bytes = op.cost.bytes / 2;  // read and written
    if (std::string_view(op.name) == "copy_to_device") to_device += bytes;
    if (std::string_view(op.name) == "copy_to_host") to_host += bytes;
  }
  double to_device = 0, to_host = 0;
};

// Of a stack on each rank, before its step and after.
std::vector<PlannedAndDone> plan_and_step(
    int ranks, int replicas, const std::function<void(ShardOptions&)>& set = [](auto&) {}) {
  return on_ranks(ranks, [&](World& world) {
    Stack stack(kPlanned);
    ShardOptions options{.mesh = mesh_of(world, replicas)};
    set(options);
    stack.shard(options);
    nn::init(stack, {1}, world.device());
    PlannedAndDone out{.plan = shard_plan(stack), .counters = {}};
    SeenCopies seen;
    world.device().context().add_observer(seen);
    planned_loss(stack, world).backward();
    world.device().synchronize();
    world.device().context().remove_observer(seen);
    out.counters = shard_counters(stack);
    out.to_device = seen.to_device;
    out.to_host = seen.to_host;
    return out;
  });
}

}  // namespace

TEST_CASE("a plan of what is by default, and not packed, has no line more") {
  for (const PlannedAndDone& of : plan_and_step(2, 1, [](auto& o) { o.packed_bytes = 0; }))
    // Of each unit 512 bytes of parameters, of the first layer's twice, and as many of gradients,
    // with 256 of counts.
    CHECK(below_table(of.plan).starts_with(
        "  collectives of one forward and backward: 4 all-gathers of 2,048 bytes, 3 "
        "reduce-scatters of 2,304 bytes\n"
        "  without gradient sync 1,536 bytes of unsharded gradients\n"
        "  arena "));
}

TEST_CASE("a plan says what replicas sum") {
  for (const PlannedAndDone& of : plan_and_step(4, 2)) {
    // A rank's values lie in 64 + 64 elements of each unit, and 2 counts behind them.
    constexpr std::int64_t kSums = (64 + 64 + 2) * 4;
    for (const ShardPlan::Unit& unit : of.plan.units) {
      CHECK(unit.all_reduces_per_call == 1);
      CHECK(unit.all_reduce_bytes == kSums);
    }
    CHECK(of.counters.all_reduces == 3);
    CHECK_THAT(of.plan.to_string(), Contains("\n  over replicas 3 all-reduces of 1,560 bytes\n"));
  }
}

TEST_CASE("a plan says what is copied between host and device") {
  struct Copied {
    int ranks;
    DType param;
    Reshard reshard;
    std::int64_t to_device;
    const char* said;
  };
  // Of one rank all of a parameter, of several the largest chunk. With the padding in front of the
  // second of a unit's, the first layer twice where backward does not gather it from neighbours.
  const Copied copied =
      GENERATE(Copied{1, f32, Reshard::automatic, (2 * 69 + 67 + 65) * 4, "1,080"},
               Copied{2, f32, Reshard::automatic, (2 * 67 + 66 + 65) * 4, "1,060"},
               Copied{2, bf16, Reshard::automatic, (2 * 67 + 66 + 65) * 2, "530"},
               Copied{4, f32, Reshard::to(2), (66 + 65 + 65) * 4, "784"});
  CAPTURE(copied.ranks, copied.param);
  for (const PlannedAndDone& of : plan_and_step(copied.ranks, 1, [&](ShardOptions& options) {
         options.precision.param = copied.param;
         options.reshard_after_forward = copied.reshard;
         options.offload = Offload::cpu;
       })) {
    constexpr std::int64_t kToHost = 3 * (64 + 64 + 2) * 4;
    std::int64_t to_device = 0, to_host = 0;
    for (const ShardPlan::Unit& unit : of.plan.units) {
      to_device += unit.copied_to_device_bytes;
      to_host += unit.copied_to_host_bytes;
    }
    CHECK(to_device == copied.to_device);
    CHECK(to_host == kToHost);
    CHECK(of.to_device == to_device);
    CHECK(of.to_host == kToHost);
    CHECK_THAT(
        of.plan.to_string(),
        Contains(concat("\n  offload: copies of ", copied.said,
                        " bytes to the device, of 1,560 back, in one forward and backward\n")));
  }
}

TEST_CASE("a plan says what is ragged, and what is ignored") {
  for (const ShardPlan& plan : on_ranks(2, [](World& world) {
         Stack stack({4, 6, 3});
         stack.layers[0].weight.set_block_rows(2);
         stack.layers[0].bias.set_block_rows(1);
         stack.scale.set_block_rows(1);
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .ignored = stack.layers[1].parameters()};
         shard_each({&stack.layers[0], &stack}, options);
         nn::init(stack, {1}, world.device());
         return shard_plan(stack);
       })) {
    using Ragged = std::vector<std::pair<std::int64_t, std::int64_t>>;
    CHECK(plan.units[0].ragged == Ragged{{1, 3}});
    CHECK(plan.units[1].ragged == Ragged{{1, 6}, {2, 24}});
    CHECK(plan.ignored_parameters == 2);
    CHECK(plan.ignored_numel == 3 * 6 + 3);
    CHECK_THAT(
        plan.to_string(),
        Contains("\n  '(root)' shards 3 elements by blocks of 1 row, which travel by counts\n"
                 "  'layers.0' shards 6 elements by blocks of 1 row, which travel by counts\n"
                 "  'layers.0' shards 24 elements by blocks of 2 rows, which travel by "
                 "counts\n"
                 "  ignored: 2 tensors of 21 elements, whole on each rank, their gradients "
                 "left to the program\n"));
  }
}

TEST_CASE("a plan says which gathers are over neighbours, and what these fill") {
  for (const auto& [plan, plain] : on_ranks(4, [](World& world) {
         const auto planned = [&](bool is_encoded) {
           Stack stack({64, 64, 3});
           if (is_encoded) stack.layers[0].weight.set_gather_transform(gather_in_e4m3());
           stack.shard({.mesh = DeviceMesh::flat(world),
                        .reshard_after_forward = Reshard::to(2),
                        .packed_bytes = 0});
           nn::init(stack, {1}, world.device());
           return shard_plan(stack);
         };
         return std::pair(planned(true), planned(false));
       })) {
    // The last layer has 4 rows of 64 with the padding, and 4; the root 4 and 4.
    constexpr std::int64_t kWeight = 64 * 64 * 4, kOther = 256, kLast = 4 * 64 * 4 + 256,
                           kRoot = 2 * 256, kNear = kWeight + kOther + kLast + kRoot,
                           kEncoded = 64 * 64 + 64 * 4;  // with a scale a row
    for (const ShardPlan::Unit& unit : plan.units) CHECK(unit.post_forward_gathers == 1);
    CHECK(plan.units[1].wire_bytes == kEncoded + kOther);
    CHECK(plan.units[1].post_forward_wire_bytes == kWeight + kOther);
    static_assert(kNear == 18'432 && 2 * kNear - kWeight + kEncoded == 24'832);
    CHECK_THAT(plain.to_string(), Contains(": 6 all-gathers of 36,864 bytes"));
    for (const ShardPlan& either : {plain, plan})
      CHECK_THAT(either.to_string(),
                 Contains("\n  of them 3 all-gathers of 18,432 bytes are over 2 ranks\n"));
    CHECK_THAT(plan.to_string(), Contains(": 6 all-gathers of 24,832 bytes"));
  }
}

TEST_CASE("a plan says what of a unit is not as by default") {
  for (const auto& [plan, all] : on_ranks(2, [](World& world) {
         Stack stack({4, 4, 4, 4, 4});
         ShardOptions options{.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}};
         options.precision.cast_forward_inputs = false;
         options.precision.output = f32;
         fully_shard(stack.layers[0], options);
         options.precision = {};
         options.precision.cast_forward_inputs = false;  // to what is not set
         options.prefetch_depth = 2;
         for (int i : {1, 2, 3}) fully_shard(stack.layers[static_cast<std::size_t>(i)], options);
         fully_shard(stack, options);
         nn::init(stack, {1}, world.device());
         set_reshard_after_backward(stack.layers[0], false);
         const ShardPlan all = shard_plan(stack);
         set_gradient_divide_factor(stack.layers[1], 0.5);
         set_reductions_in_flight(stack.layers[1], 3);
         set_all_reduce_hook(stack.layers[1], [](const ReducedGradient&) {});
         set_modules_to_forward_prefetch(stack.layers[1], {&stack.layers[2], &stack.layers[3]});
         set_modules_to_backward_prefetch(stack.layers[1], {&stack.layers[0]});
         return std::pair(shard_plan(stack), all);
       })) {
    const std::string same =
        "\n  '(root)', 'layers.1', 'layers.2' and 1 more: prefetch depth 2\n"
        "  'layers.0': inputs not cast, open after backward, counted as after an update, output "
        "f32\n";
    CHECK_THAT(all.to_string(), Contains(same));
    CHECK_THAT(plan.to_string(),
               Contains(same + "  'layers.1': 3 reductions in flight, an all-reduce hook, backward "
                               "prefetches 'layers.0', forward prefetches 'layers.2', 'layers.3', "
                               "gradients divided by 0.5\n"));
    const ShardPlan::Unit& unit = plan.units[2];
    CHECK(unit.prefetch_depth == 2);
    CHECK(unit.reductions_in_flight == 3);
    CHECK(unit.divide_factor == 0.5);
    CHECK(unit.has_all_reduce_hook);
    CHECK(unit.forward_prefetch == std::vector<std::string>{"layers.2", "layers.3"});
    CHECK(unit.backward_prefetch == std::vector<std::string>{"layers.0"});
    CHECK(unit.casts_inputs);
    CHECK(plan.units[1].output == f32);
    CHECK_FALSE(plan.units[1].casts_inputs);
    CHECK_FALSE(plan.units[1].reshards_after_backward);
  }
  for (const PlannedAndDone& of : plan_and_step(2, 1, [](ShardOptions& options) {
         options.prefetch_depth = 3;
         options.forwards_ahead = 1;
       })) {
    CHECK(of.plan.forwards_ahead == 1);
    CHECK_THAT(of.plan.to_string(), Contains("\n  all units: prefetch depth 3\n"
                                             "  the host is 1 forward ahead at most\n"));
  }
}

TEST_CASE("a plan counts gathers as the program has set them since, and steps have so many") {
  for (const auto& [planned, done] : on_ranks(2, [](World& world) {
         Stack stack(kPlanned);
         start(stack, world, 1);
         std::vector<std::uint64_t> planned, done;
         const auto count = [&] {
           std::uint64_t gathers = 0;
           for (const ShardPlan::Unit& unit : shard_plan(stack).units)
             gathers += static_cast<std::uint64_t>(unit.gathers_per_call);
           planned.push_back(gathers);
         };
         for (const Reshard when : kReshards) {
           set_reshard_after_forward(stack, when);
           count();
           for (int step = 0; step < 3; ++step) {  // the last on a plan of its own
             const std::uint64_t before = shard_counters(stack).gathers;
             planned_loss(stack, world).backward();
             if (step == 2) done.push_back(shard_counters(stack).gathers - before);
           }
         }
         set_reshard_after_forward(stack, Reshard::always);
         set_unshard_in_backward(stack.layers[0], false);
         count();
         return std::pair(planned, done);
       })) {
    CHECK(planned == std::vector<std::uint64_t>{4, 6, 3, 5});
    CHECK(done == std::vector<std::uint64_t>{4, 6, 3});
  }
}
