// Micro-batches whose gradients are reduced at once, later, or over the replicas later: values,
// collectives, memory.
#include <map>
#include <string>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/micro_batches.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/support/launches.hpp"
#include "tests/support/mesh.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct Accumulated {
  Values gradients;  // whole, of the first step
  Values parameters;
  ShardCounters counters;
  std::uint64_t unplanned_later = 0;  // slots behind the third step
  std::int64_t held = 0;              // bytes, before the last micro-batch of a step, the most
  std::int64_t left = 0;              // and behind it
};

Accumulated accumulate(World& world, const DeviceMesh& mesh, ShardOptions options, Way way,
                       int steps = 2) {
  Stack model({5, 7, 1, 3});
  make_positive(model);
  options.mesh = mesh;
  options.reshard_after_forward = reshard_on(mesh, options.reshard_after_forward);
  model.shard(options);
  nn::init(model, {11}, world.device());
  optim::SGD optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.5});
  Accumulated found;
  const DType dtype = options.precision.param.value_or(f32);
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      begin_micro_batch(way, model, model.layers[1], micro + 1 == kMicroBatches);
      found.held = std::max(found.held, unreduced_bytes(world.device()));
      const Tensor y = cast(model(micro_batch(world, step, micro, dtype)), f32);
      (mean_square(y) / kMicroBatches).backward();
    }
    found.left = std::max(found.left, unreduced_bytes(world.device()));
    if (step == 0)
      for (const auto& [name, p] : model.named_parameters())
        found.gradients[name] = p.distributed_grad().full().to_vector<float>();
    if (step == 2) found.unplanned_later = shard_counters(model).unplanned_slots;
    optimizer.step();
    optimizer.zero_grad();
  }
  found.parameters = full_values(model);
  found.counters = shard_counters(model);
  found.unplanned_later = found.counters.unplanned_slots - found.unplanned_later;
  return found;
}

}  // namespace

TEST_CASE("micro-batches give the gradient of one rank, whenever they are reduced",
          "[threads][fsdp2-044][fsdp2-046]") {
  const auto [replicas, ranks] =
      GENERATE(std::pair(1, 2), std::pair(1, 4), std::pair(2, 4), std::pair(4, 4));
  const std::int64_t piece = GENERATE(std::int64_t{1}, std::int64_t{32} << 20);
  const Reshard asked =
      GENERATE(as<Reshard>{}, Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2));
  const bool has_part = ranks / replicas == 4;
  const Reshard reshard = asked.is_partial() && !has_part ? Reshard::always : asked;
  const World nowhere = World::single();
  const ShardOptions options{
      .mesh = DeviceMesh::flat(nowhere), .reshard_after_forward = reshard, .piece_bytes = piece};
  const auto run = [&, replicas = replicas](int count, Way way, const ExecutorChoice& executor) {
    return on_ranks(count, {.executor = executor, .threads = 1}, [&](World& world) {
      return accumulate(world, mesh_of(world, replicas), options, way);
    });
  };
  const Accumulated alone = run(1, Way::no_sync, ExecutorKind::threaded)[0];
  CHECK(alone.held == 0);  // nothing is shared, so nothing waits
  static GridShare share;  // of all that is generated
  for (const Way way :
       {Way::sync, Way::no_sync, Way::no_sync_of_one, Way::no_sync_of_root, Way::no_all_reduce}) {
    if (!share.takes()) continue;
    CAPTURE(replicas, ranks, piece, reshard, static_cast<int>(way));
    const auto all = run(ranks, way, ExecutorKind::threaded);
    const auto shuffled = run(ranks, way, testing::shuffled(7));
    // Units: three layers and the root. Two steps, in which `reduced` reductions are left out.
    const std::uint64_t every = 4 * kMicroBatches * 2, once = 4 * 2,
                        missing = way == Way::no_sync         ? every - once
                                  : way == Way::sync          ? 0
                                  : way == Way::no_all_reduce ? 0
                                                              : (every - once) / 4;
    const bool postpones = way == Way::no_all_reduce && replicas > 1;
    // Whenever they are reduced, forward and backward gather a unit once each; omitted are the
    // backward's of what stays open: under `automatic` the root's and the last layer's.
    const std::uint64_t omitted = reshard == Reshard::never       ? every
                                  : reshard == Reshard::automatic ? every / 2
                                                                  : 0,
                        gathers = replicas == ranks ? 0 : 2 * every - omitted;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      // Sums of terms of one sign in another order, of as many roundings as one rank's.
      CHECK(distance(alone.gradients, all[rank].gradients) < kRounding);
      CHECK(same_bits(all[rank].gradients, all[0].gradients));
      CHECK(same_bits(all[rank].parameters, shuffled[rank].parameters));
      CHECK(all[rank].counters.gathers == gathers);
      CHECK(all[rank].counters.reductions == every - missing);
      CHECK(all[rank].counters.all_reduces == (replicas == 1 ? 0
                                               : postpones   ? once
                                                             : every - missing));
      CHECK((all[rank].held > 0) == (missing > 0 || postpones));
      CHECK(all[rank].left == 0);
    }
  }
}

namespace {

// How often each unit did it, whatever was decided of it in between. A table's slices count as one:
// all of them must have done it as often.
std::map<std::string, std::uint64_t> by_unit(const Launches& launches,
                                             const std::string& collective) {
  std::map<std::string, std::uint64_t> parts, units;
  for (const auto& [name, count] : launches.counts())
    if (name.starts_with(collective + ' ')) {
      const std::string unit = name.substr(collective.size() + 1);
      parts[unit.substr(0, unit.find(" ("))] += count;
    }
  for (const auto& [part, count] : parts) {
    const auto at = units.try_emplace(part.substr(0, part.find('[')), count).first;
    if (at->second != count) at->second = 0;
  }
  return units;
}

}  // namespace

TEST_CASE("a streamed table is gathered and reduced as a unit is, and what is offloaded copied so",
          "[threads][fsdp2-044]") {
  struct Counted {
    std::map<std::string, std::uint64_t> gathers, reductions;
    std::uint64_t slices = 0, all_gathers = 0, all_reductions = 0, to_device = 0, to_host = 0;
  };
  const Offload offload = GENERATE(Offload::none, Offload::cpu);
  const bool slices_wait = GENERATE(false, true), cuts = GENERATE(false, true);
  const Way way = GENERATE(Way::sync, Way::no_sync);
  CAPTURE(offload == Offload::cpu, slices_wait, cuts, static_cast<int>(way));
  const auto found = on_ranks(2, [&](World& world) {
    nn::Llama model(small_llama(2), Device::meta());
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .reshard_after_forward = Reshard::always,
                               .slice_bytes = 100,
                               .slices_wait = slices_wait,
                               .piece_bytes = cuts ? 1 : 32 << 20,
                               .offload = offload};
    shard_parts(model, options);
    nn::init(model, {11}, world.device());
    const Tensor tokens =
        Tensor::from(std::vector<std::int32_t>{1, 5, 9, 2}, {1, 4}, world.device());
    const auto step = [&] {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        if (way == Way::no_sync) set_requires_gradient_sync(model, micro + 1 == kMicroBatches);
        model.loss(tokens, tokens).backward();
      }
      for (const auto& part : parts_of(model.parameters())) part.group->gradient = {};
    };
    step();
    const Launches launches(world.device());
    step();
    Counted counted{by_unit(launches, "all_gather"),
                    by_unit(launches, "reduce_scatter"),
                    0,
                    launches.of("all_gather "),
                    launches.of("reduce_scatter "),
                    launches.of("copy_to_device"),
                    launches.of("copy_to_host")};
    for (const auto& [name, count] : launches.counts())
      counted.slices += name.starts_with("reduce_scatter lm_head.weight[") ? 1 : 0;
    return counted;
  });
  constexpr std::uint64_t k = kMicroBatches;
  const std::uint64_t once = way == Way::sync ? k : 1, of_tables = slices_wait ? once : k;
  const std::string embedding = "model.embed_tokens.weight", head = "lm_head.weight";
  for (const Counted& rank : found) {
    CHECK(rank.slices > 1);
    REQUIRE(rank.gathers.size() == 5);  // two tables, two blocks, and the norm of the root
    REQUIRE(rank.reductions.size() == 5);
    for (const auto& [unit, count] : rank.gathers)
      CHECK(count == (unit == embedding ? k : 2 * k));  // which backward does not read
    for (const auto& [unit, count] : rank.reductions) {
      CAPTURE(unit);
      const std::uint64_t passes = unit == embedding || unit == head ? of_tables : once;
      CHECK((cuts ? count >= passes && count % passes == 0 : count == passes));
    }
    // To the device goes one copy for each gather, back from it one for each piece.
    CHECK(rank.to_device == (offload == Offload::cpu ? rank.all_gathers : 0));
    CHECK(rank.to_host == (offload == Offload::cpu ? rank.all_reductions : 0));
  }
}

TEST_CASE("gradients in 16 bits add up unreduced in the dtype of the wire",
          "[threads][fsdp2-088]") {
  const World nowhere = World::single();
  for (const bool is_narrow : {false, true}) {
    const ShardOptions options{
        .mesh = DeviceMesh::flat(nowhere),
        .precision = {.param = bf16, .reduce = is_narrow ? std::optional(bf16) : std::nullopt}};
    for (const auto& [way, replicas] : {std::pair(Way::no_sync, 1), {Way::no_all_reduce, 2}}) {
      const auto run = [&, replicas = replicas](Way chosen) {
        return on_ranks(4, [&](World& world) {
          return accumulate(world, mesh_of(world, replicas), options, chosen, 1);
        });
      };
      const auto later = run(way), at_once = run(Way::sync);
      CAPTURE(is_narrow, static_cast<int>(way));
      // Terms of one sign. In bf16 a sum of three is rounded at most twice more than where f32 has
      // them, and is sent and summed once where the others are three times: 2^-8 each. In f32 only
      // the order differs.
      const double most = is_narrow ? 2 * 5 * 0x1p-8 : kRounding;
      for (std::size_t rank = 0; rank < later.size(); ++rank)
        CHECK(distance(at_once[rank].gradients, later[rank].gradients) < most);
      CHECK(later[0].held > 0);
    }
  }
}

TEST_CASE("steps with and without reductions in turn come to rest", "[threads]") {
  const World nowhere = World::single();
  for (const Reshard reshard : kReshards)
    for (const Way way : {Way::no_sync, Way::no_sync_of_one, Way::no_sync_of_root}) {
      const ShardOptions options{
          .mesh = DeviceMesh::flat(nowhere), .reshard_after_forward = reshard, .piece_bytes = 1};
      CAPTURE(reshard, static_cast<int>(way));
      for (const Accumulated& rank : on_ranks(2, [&](World& world) {
             return accumulate(world, DeviceMesh::flat(world), options, way, 6);
           }))
        CHECK(rank.unplanned_later == 0);
    }
}

TEST_CASE("what backward keeps unreduced has the bytes of the plan", "[threads]") {
  const auto found = on_ranks(4, [&](World& world) {
    Stack model({64, 64, 64});
    model.shard({.mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2})});
    nn::init(model, {1}, world.device());
    const ShardPlan plan = shard_plan(model);
    const Ledger& ledger = Memory::of(world.device()).ledger();
    const auto backward = [&] {
      mean_square(model(rows_of(1, world.rank(), 1, 64, world.device()))).backward();
    };
    std::vector<std::int64_t> bytes(4);
    for (const ShardPlan::Unit& unit : plan.units) {
      bytes[0] += unit.unsharded_gradient_bytes;
      bytes[1] += unit.postponed_sum_bytes;
    }
    set_requires_gradient_sync(model, false);
    backward();
    bytes[2] = ledger.live_bytes("unsharded gradients");
    set_requires_gradient_sync(model, true);
    set_requires_all_reduce(model, false);
    backward();
    bytes[3] = ledger.live_bytes("postponed sums");
    bytes.push_back(ledger.live_bytes("unsharded gradients"));
    return std::pair(bytes, plan.to_string());
  });
  for (const auto& [bytes, text] : found) {
    CHECK(bytes[0] > 0);
    CHECK(bytes[2] == bytes[0]);
    CHECK(bytes[3] == bytes[1]);
    CHECK(bytes[4] == 0);  // they have been reduced with the others
    CHECK_THAT(text, Contains("without gradient sync ") && Contains(", without all-reduce "));
  }
}
