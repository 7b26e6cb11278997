// How many reductions are in flight, as a program changes it.
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("reductions in flight that are set have the memory and the bits of the option",
          "[threads]") {
  struct Found {
    std::vector<std::int64_t> arena;  // after each training of four steps
    std::vector<std::uint64_t> unplanned;
    Values values;
    std::string refused;
  };
  const auto train = [](World& world, const std::vector<int>& in_flight) {
    Stack model({16, 16, 16, 16, 16, 16, 16, 16});
    model.shard(
        {.mesh = DeviceMesh::flat(world), .reductions_in_flight = in_flight[0], .piece_bytes = 1});
    nn::init(model, {11}, world.device());
    optim::SGD optimizer(model.parameters(), {.lr = 0.05});
    Found found;
    for (std::size_t k = 0; k < in_flight.size(); ++k) {
      if (k > 0) set_reductions_in_flight(model, in_flight[k]);
      for (std::uint64_t step = 0; step < 4; ++step) {
        mean_square(model(rows_of(4 * k + step, world.rank(), 1, 16, world.device()))).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      found.arena.push_back(shard_plan(model).arena_bytes);
      found.unplanned.push_back(shard_counters(model).unplanned_slots);
    }
    found.values = full_values(model);
    found.refused = thrown_by([&] { set_reductions_in_flight(model, 65); });
    return found;
  };
  const auto one = on_ranks(2, [&](World& world) { return train(world, {1, 1, 1}); });
  const auto three = on_ranks(2, [&](World& world) { return train(world, {3, 3, 3}); });
  const auto set = on_ranks(2, [&](World& world) { return train(world, {1, 3, 1}); });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(three[rank].arena[0] > one[rank].arena[0]);
    CHECK(set[rank].arena ==
          std::vector{one[rank].arena[0], three[rank].arena[0], one[rank].arena[0]});
    CHECK(set[rank].unplanned == one[rank].unplanned);
    CHECK(same_bits(set[rank].values, one[rank].values));
    CHECK_THAT(set[rank].refused, Contains("reductions is 65; expected 1 to 64"));
  }
}

TEST_CASE("a limit of reductions in flight is its unit's alone, of its root alone",
          "[threads][fsdp2-082]") {
  using Limits = std::vector<int>;  // of the root and its seven layers
  const std::vector<std::int64_t> widths(8, 16);
  struct Found {
    std::vector<Limits> limits;
    std::vector<std::int64_t> arena;
    bool other_is_as_it_was = true, is_same = true;
  };
  const auto found = on_ranks(2, [&](World& world) {
    Stack model(widths), other(widths), plain(widths);
    for (Stack* const each : {&model, &other, &plain}) {
      each->shard({.mesh = DeviceMesh::flat(world), .piece_bytes = 1});
      nn::init(*each, {11}, world.device());
    }
    const auto train = [&](Stack& of) {  // until its slots are planned anew
      for (std::uint64_t step = 0; step < 4; ++step) {
        mean_square(of(rows_of(step, world.rank(), 1, 16, world.device()))).backward();
        optim::SGD optimizer(of.parameters(), {.lr = 0.05});
        optimizer.step();
        optimizer.zero_grad();
      }
      return shard_plan(of);
    };
    Found f;
    const std::string as_it_was = train(other).to_string();
    const auto look = [&] {
      const ShardPlan plan = train(model);
      train(plain);
      Limits limits;
      for (const ShardPlan::Unit& unit : plan.units) limits.push_back(unit.reductions_in_flight);
      f.limits.push_back(limits);
      f.arena.push_back(plan.arena_bytes);
      f.other_is_as_it_was = f.other_is_as_it_was && train(other).to_string() == as_it_was;
      f.is_same = f.is_same && same_bits(full_values(model), full_values(plain));
    };
    look();
    set_reductions_in_flight(model.layers[5], 5, /*recurse=*/false);
    look();
    set_reductions_in_flight(model, 2, /*recurse=*/false);
    look();
    set_reductions_in_flight(model, 1, /*recurse=*/false);
    set_reductions_in_flight(model.layers[5], 1);
    look();
    set_reductions_in_flight(model, 5);
    look();
    return f;
  });
  for (const Found& f : found) {
    CHECK(f.limits == std::vector<Limits>{{1, 1, 1, 1, 1, 1, 1, 1},
                                          {1, 1, 1, 1, 1, 1, 5, 1},
                                          {2, 1, 1, 1, 1, 1, 5, 1},
                                          {1, 1, 1, 1, 1, 1, 1, 1},
                                          {5, 5, 5, 5, 5, 5, 5, 5}});
    REQUIRE(f.arena.size() == 5);
    CHECK(f.arena[1] > f.arena[0]);  // that layer's gradient stays beside those behind it,
    CHECK(f.arena[1] < f.arena[4]);  // theirs do not
    CHECK(f.arena[2] == f.arena[1]);
    CHECK(f.arena[3] == f.arena[0]);
    CHECK(f.other_is_as_it_was);
    CHECK(f.is_same);
  }
}

TEST_CASE(
    "reductions in flight that differ between ranks are told, and a failure before they count "
    "is left behind",
    "[threads]") {
  const auto found = on_ranks(2, [](World& world) {
    Stack model({16, 16, 16, 16});
    model.shard({.mesh = DeviceMesh::flat(world), .piece_bytes = 1});
    nn::init(model, {11}, world.device());
    const auto step = [&] {
      mean_square(model(rows_of(1, world.rank(), 1, 16, world.device()))).backward();
      optim::SGD(model.parameters(), {.lr = 0}).zero_grad();
    };
    for (int k = 0; k < 3; ++k) step();
    set_reductions_in_flight(model, 1 + world.rank());  // what it is on rank 0
    std::vector<std::string> said = {thrown_by(step)};
    reset(model);
    set_reductions_in_flight(model, 5);
    try {  // rank 1 does not come to the forward
      if (world.rank() == 1) throw std::runtime_error("no data");
      step();
      world.device().synchronize();
    } catch (const std::exception& error) {
      said.emplace_back(error.what());
    }
    reset(model);
    for (int k = 0; k < 3; ++k) step();
    world.device().synchronize();
    said.push_back(concat(shard_plan(model).arena_bytes));
    return said;
  });
  for (const auto& said : found) {
    REQUIRE(said.size() == 3);
    CHECK_THAT(said[0], Contains("differs between ranks in reductions_in_flight; here: "));
  }
  CHECK(found[0][2] == found[1][2]);
}
