// Micro-batches whose gradients are reduced at once, later, or over the replicas later: values,
// collectives, memory; refusals.
#include <map>
#include <string>

#include "tessera/distributed/distributed_tensor.hpp"
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

std::int64_t kept_bytes(const Device& device) {
  const Ledger& ledger = Memory::of(device).ledger();
  return ledger.live_bytes("unsharded gradients") + ledger.live_bytes("postponed sums");
}

Accumulated accumulate(World& world, const DeviceMesh& mesh, ShardOptions options, Way way,
                       int steps = 2) {
  Stack model({5, 7, 1, 3});
  make_positive(model);
  options.mesh = mesh;
  options.reshard_after_forward = reshard_on(mesh, options.reshard_after_forward);
  model.shard(options);
  nn::init(model, {11}, world.device());
  optim::Sgd optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.5});
  Accumulated found;
  const DType dtype = options.precision.param.value_or(f32);
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      begin_micro_batch(way, model, model.layers[1], micro + 1 == kMicroBatches);
      found.held = std::max(found.held, kept_bytes(world.device()));
      const Tensor y = cast(model(micro_batch(world, step, micro, dtype)), f32);
      (mean_square(y) / kMicroBatches).backward();
    }
    found.left = std::max(found.left, kept_bytes(world.device()));
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
  const auto run = [&, replicas = replicas](int count, Way way, ExecutorKind executor) {
    return on_ranks(
        count, {.executor = executor, .schedule_seed = 7, .threads = 1},
        [&](World& world) { return accumulate(world, mesh_of(world, replicas), options, way); });
  };
  const Accumulated alone = run(1, Way::no_sync, ExecutorKind::threaded)[0];
  CHECK(alone.held == 0);  // nothing is shared, so nothing waits
  static GridShare share;  // of all that is generated
  for (const Way way :
       {Way::sync, Way::no_sync, Way::no_sync_of_one, Way::no_sync_of_root, Way::no_all_reduce}) {
    if (!share.takes()) continue;
    CAPTURE(replicas, ranks, piece, reshard, static_cast<int>(way));
    const auto all = run(ranks, way, ExecutorKind::threaded);
    const auto shuffled = run(ranks, way, ExecutorKind::shuffled);
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
    for (nn::Module* const part : model.parts()) fully_shard(*part, options);
    fully_shard(model, options);
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
  for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never})
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

TEST_CASE("what is to be reduced changes between steps only, and of units", "[threads]") {
  const auto found = on_ranks(2, [](World& world) {
    Stack model({5, 7, 3});
    nn::Linear plain(2, 2);
    std::vector<std::string> messages = {
        thrown_by([&] { set_requires_gradient_sync(model, false); })};
    model.shard({.mesh = DeviceMesh::flat(world)});
    nn::init(model, {11}, world.device());
    messages.push_back(thrown_by([&] { set_requires_all_reduce(plain, false, false); }));
    messages.push_back(thrown_by([&] { set_gradient_divide_factor(plain, 2); }));
    for (const double factor : {0., -1., double{NAN}, double{INFINITY}})
      messages.push_back(thrown_by([&] { set_gradient_divide_factor(model, factor); }));
    const auto set = [&] {
      messages.push_back(thrown_by([&] { set_requires_gradient_sync(model, false); }));
      messages.push_back(thrown_by([&] { set_gradient_divide_factor(model, 1); }));
    };
    run_within_step(model, rows_of(1, world.rank(), 1, 5, world.device()), set);
    return messages;
  });
  for (const auto& messages : found) {
    REQUIRE(messages.size() == 11);
    CHECK_THAT(messages[0], Contains("is not a unit, nor is one below it; call fully_shard"));
    CHECK_THAT(messages[1], Contains("' is not a unit; call"));
    CHECK_THAT(messages[2], Contains("' is not a unit; call"));
    for (std::size_t i = 3; i < 7; ++i) CHECK_THAT(messages[i], Contains("finite number above 0"));
    for (std::size_t i = 7; i < 11; ++i) CHECK_THAT(messages[i], Contains("do it between steps"));
  }
}

TEST_CASE("gradients are divided by the factor that their unit was given",
          "[threads][fsdp2-080][fsdp2-083]") {
  for (const auto& [replicas, ranks] : {std::pair(1, 1), {1, 2}, {2, 4}, {4, 4}})
    for (const Way way : {Way::sync, Way::no_sync, Way::no_all_reduce}) {
      const MixedPrecision precision = GENERATE(MixedPrecision{}, MixedPrecision{.param = bf16},
                                                MixedPrecision{.param = bf16, .reduce = bf16});
      const auto found = on_ranks(ranks, [&, replicas = replicas](World& world) {
        const auto gradients = [&](double factor) {
          Stack model({5, 7, 3});
          model.shard({.mesh = mesh_of(world, replicas), .precision = precision});
          nn::init(model, {11}, world.device());
          if (factor > 0) set_gradient_divide_factor(model, factor);
          for (const bool is_last : {false, true}) {
            begin_micro_batch(way, model, model.layers[1], is_last);
            mean_square(cast(model(rows_of(1, world.rank(), 1, 5, world.device())), f32))
                .backward();
          }
          return shard_gradients(model);
        };
        return std::array{gradients(0), gradients(world.size()), gradients(2 * world.size())};
      });
      for (const auto& [mean, same, half] : found) {
        CAPTURE(replicas, ranks, static_cast<int>(way));
        CHECK(same_bits(mean, same));
        for (const auto& [name, values] : mean) {
          std::vector<float> expected = values;  // powers of 2: exact
          if (!name.starts_with("layers"))       // the root's alone
            for (float& g : expected) g /= 2;
          CHECK(same_bits(expected, half.at(name)));
        }
      }
    }
}

TEST_CASE("ranks that differ in what they reduce are told so on each of them", "[threads]") {
  const bool stays_open = GENERATE(false, true);  // so that no gather tells
  for (const Way way : {Way::no_sync, Way::no_all_reduce}) {
    CAPTURE(stays_open, static_cast<int>(way));
    const int ranks = way == Way::no_sync ? 2 : 4;
    std::vector<std::string> messages(static_cast<std::size_t>(ranks));
    CHECK_THROWS_AS(
        run_checked(
            ranks, {.threads = 1},
            [&](World& world) {
              Stack model({5, 7, 3});
              model.shard({.mesh = mesh_of(world, way == Way::no_sync ? 1 : 2)});
              nn::init(model, {11}, world.device());
              shard_plan(model);  // so that ranks have agreed upon units before
              const auto backward = [&] {
                mean_square(model(rows_of(1, world.rank(), 1, 5, world.device()))).backward();
              };
              if (stays_open) {
                set_reshard_after_forward(model, Reshard::never);
                set_reshard_after_backward(model, false);
                backward();
                world.device().synchronize();
              }
              try {
                if (world.rank() == 1) begin_micro_batch(way, model, model.layers[1], false);
                backward();
                begin_micro_batch(way, model, model.layers[1], true);
                backward();
                world.device().synchronize();
              } catch (const CommError& error) {
                messages[static_cast<std::size_t>(world.rank())] = error.what();
                throw;
              }
            }),
        CommError);
    for (const std::string& message : messages) {
      const std::string decided = way == Way::no_sync ? "set_requires_gradient_sync(false)"
                                                      : "set_requires_all_reduce(false)";
      const std::string call = stays_open ? "reduce_scatter layers.1" : "all_gather (root)",
                        said = stays_open ? "with what was kept unreduced" : decided;
      CHECK_THAT(
          message,
          Contains("rank 0 submitted '" + call + "' (") &&
              Contains("but rank 1 submitted '" + call + " (" + said + ")' (") &&
              Contains("what stands in parentheses comes of calls that all ranks make, or none"));
    }
  }
}

// Their gathers are of one replica, so that the sums over replicas alone can tell.
TEST_CASE("replicas that differ in what they reduce are told so on each of them", "[threads]") {
  for (const int ranks : {2, 4}) {  // of one rank each, and of two
    CAPTURE(ranks);
    const auto all = on_ranks(ranks, [&](World& world) {
      Stack model({5, 7, 3});
      model.shard({.mesh = mesh_of(world, 2)});
      nn::init(model, {11}, world.device());
      shard_plan(model);  // so that ranks have agreed upon units before
      const std::string heard = thrown_by<CommError>([&] {
        for (const bool is_last : {false, true}) {
          set_requires_gradient_sync(model, is_last || world.rank() < ranks / 2);
          mean_square(model(rows_of(1, world.rank(), 1, 5, world.device()))).backward();
        }
        world.device().synchronize();
      });
      reset(model);
      return heard;
    });
    for (const std::string& heard : all)
      CHECK_THAT(heard, Contains("submitted 'all_reduce layers.1' (") &&
                            Contains("'all_reduce layers.1 (with what was kept unreduced)' ("));
  }
}

TEST_CASE("a backward that a rank leaves out without a word is told where no gather tells",
          "[threads]") {
  const int replicas = GENERATE(1, 2);
  CAPTURE(replicas);
  const auto all = on_ranks(2, [&](World& world) {
    Stack model({5, 7, 3});
    model.shard({.mesh = mesh_of(world, replicas)});
    nn::init(model, {11}, world.device());
    set_reshard_after_forward(model, Reshard::never);
    set_reshard_after_backward(model, false);
    const auto loss = [&] {
      return mean_square(model(rows_of(1, world.rank(), 1, 5, world.device())));
    };
    const std::string heard = thrown_by<CommError>([&] {
      loss().backward();
      const Tensor second = loss();
      if (world.rank() == 0) second.backward();
      loss().backward();
      world.device().synchronize();
    });
    reset(model);
    return heard;
  });
  for (const std::string& heard : all)
    CHECK_THAT(heard, Contains("in the backward of forward 2") &&
                          Contains("in the backward of forward 3") &&
                          Contains("skip_backward(model)"));
}
