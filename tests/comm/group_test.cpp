// Groups of ranks that are threads, or that have no peers: their bits, their order, who hears what.
#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <thread>

#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/comm/battery.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::executors;
using tessera::testing::run_checked;
using K = CollectiveKind;
using Ranks = std::vector<int>;

namespace {

// The list of `lists` that holds the rank, or none.
Ranks list_of(const World& world, const std::vector<Ranks>& lists) {
  for (const Ranks& list : lists)
    if (std::ranges::find(list, world.rank()) != list.end()) return list;
  return {};
}

const RankGroup* split(const World& world, const char* name, const std::vector<Ranks>& lists) {
  return world.split(name, list_of(world, lists));
}

void must(bool condition, const char* what) {  // on rank threads
  if (!condition) throw std::logic_error(what);
}

// What each rank throws out of `body`, by rank.
Ranks::size_type at(int rank) { return static_cast<Ranks::size_type>(rank); }
std::vector<std::string> heard(int ranks, const WorldOptions& options,
                               const std::function<void(World&)>& body) {
  std::vector<std::string> messages(at(ranks));
  CHECK_THROWS(run_local(ranks, options, [&](World& world) {
    try {
      body(world);
      world.device().synchronize();
    } catch (const std::exception& error) {
      messages[at(world.rank())] = error.what();
      throw;
    }
  }));
  return messages;
}

Collective barrier_item() { return {.kind = K::barrier}; }

}  // namespace

TEST_CASE("a group of any ranks has the bits of a world of as many", "[comm][threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::map<std::size_t, std::vector<std::uint64_t>> worlds;  // hashes by size and rank
  for (int size = 1; size <= 3; ++size) worlds[at(size)] = battery::hashes_of_threads(size, seed);
  const std::vector<std::vector<Ranks>> splits = {
      {{0, 1}, {2, 3}}, {{0, 2}, {3, 1}}, {{3, 0, 2}, {1}}, {{2, 1}}};
  for (const ExecutorChoice& executor : executors(seed))
    for (const auto& lists : splits) {
      std::vector<battery::Result> results(4);
      run_checked(4, {.executor = executor, .threads = 1}, [&](World& world) {
        const RankGroup* group = split(world, "some", lists);
        if (group) results[at(world.rank())] = battery::run(*group, seed);
        world.barrier();
      });
      INFO(name(executor));
      for (const Ranks& list : lists)
        for (std::size_t i = 0; i < list.size(); ++i) {
          const battery::Result& result = results[at(list[i])];
          for (const std::string& error : result.errors) FAIL_CHECK(error);
          CHECK(result.hash == worlds[list.size()][i]);
        }
    }
}

TEST_CASE("a group knows its ranks, and counts its calls on its own", "[comm][threads]") {
  run_checked(4, {.threads = 1}, [](World& world) {
    const RankGroup& rows = *split(world, "rows", {{0, 1}, {3, 2}});
    const RankGroup* some = split(world, "some", {{1, 2}});
    const bool is_member = world.rank() == 1 || world.rank() == 2;
    must((some != nullptr) == is_member, "only who gives a list is in");
    must(rows.name() == "rows" && world.name() == "world", "groups have names");
    must(rows.size() == 2 && rows.gather().size() == 2, "and sizes");
    const Ranks expected = world.rank() < 2 ? Ranks{0, 1} : Ranks{3, 2};
    must(std::ranges::equal(rows.ranks(), expected), "and ranks in the order given");
    must(rows.ranks()[at(rows.rank())] == world.rank(), "of which this is one");
    must(rows.gather().role() == "gather of rows", "roles say of what");
    must(world.gather().role() == "gather", "but of all ranks");
    must(rows.gather().stream() == StreamId::gather, "streams are those of the world");
    must(rows.sums_are_ordered() && world.sums_are_ordered(), "sums are taken in rank order");
    must(&rows == split(world, "rows", {{0, 1}, {3, 2}}), "the same again is the same");
    const bool had = some != nullptr;
    some = split(world, "some", {{0, 3}, {1, 2}});
    must(some && some->size() == 2 && had == is_member, "who is missing can be added");
    const std::uint64_t before = world.flight_recorder().last_submitted();
    must(rows.sum(world.rank()) == (world.rank() < 2 ? 1 : 5), "the sum is the group's");
    must(rows.max(world.rank()) == (world.rank() < 2 ? 1 : 3), "and the largest");
    rows.barrier();
    must(rows.flight_recorder().last_submitted() == 3, "it has three calls");
    must(rows.control().submitted() == 3, "on one communicator");
    must(world.flight_recorder().last_submitted() == before, "none of the world");
    const auto memory = rows.allocate_symmetric(4096 * (1 + world.rank() / 2));
    must(memory->bytes() == 4096 * (1 + world.rank() / 2), "memory is the group's own");
    const RankGroup* replicas =
        world.split("replicas", list_of(world, {{0, 2}, {1, 3}}), {.reduce = StreamId::replicate});
    must(replicas->reduce().stream() == StreamId::replicate, "streams can be chosen");
  });
}

TEST_CASE("lists of ranks that do not fit together are refused on every rank", "[comm][threads]") {
  const auto refused = [](const std::function<Ranks(int)>& list, const char* name = "some") {
    std::vector<std::string> messages = heard(3, {.threads = 1}, [&](World& world) {
      try {
        world.split(name, list(world.rank()));
      } catch (const ContractError&) {
        world.barrier();  // nobody has gone ahead
        throw;
      }
    });
    for (const std::string& message : messages) {
      CHECK(message == messages[0]);
      CHECK(message.find('\n') == std::string::npos);
    }
    return messages[0];
  };
  CHECK_THAT(refused([](int rank) { return rank == 0 ? Ranks{0, 1} : Ranks{1, 2}; }),
             Contains("split 'some': rank 0 gives a group of 2 ranks, but 1 of them give it") &&
                 Contains("the same ranks in the same order"));
  CHECK_THAT(refused([](int rank) { return rank == 1 ? Ranks{} : Ranks{0, 1, 2}; }),
             Contains("a group of 3 ranks, but 2 of them"));
  CHECK_THAT(refused([](int rank) { return rank == 2 ? Ranks{2, 1, 0} : Ranks{0, 1, 2}; }),
             Contains("a group of 3 ranks, but 2 of them"));
  CHECK_THAT(refused([](int) { return Ranks{0, 1, 2, 0}; }),
             Contains("give each once, from 0 to 2"));
  CHECK_THAT(refused([](int) { return Ranks{0, 1, 2, 3}; }),
             Contains("give each once, from 0 to 2"));
  CHECK_THAT(refused([](int) { return Ranks{0, 1, 2}; }, "world"), Contains("one of its own"));
  CHECK_THAT(refused([](int) { return Ranks{0, 1, 2}; }, ""), Contains("one of its own"));
  World alone = World::emulated(1, 4);
  CHECK_THROWS_WITH(alone.split("some", Ranks{0, 2}), Contains("rank 1 gives {0, 2}"));
  alone.split("some", Ranks{0, 1});
  CHECK_THROWS_WITH(alone.split("some", Ranks{0, 1}, {.reduce = StreamId::replicate}),
                    Contains("other streams; give this one another name"));
}

TEST_CASE("ranks of a group that disagree are named as the world counts them", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    const auto messages = heard(4, {.executor = executor, .threads = 1}, [](World& world) {
      const RankGroup& group = *split(world, "odd", {{0, 2}, {3, 1}});
      float values[2] = {};
      group.control().submit({.send = values,
                              .recv = values,
                              .count = world.rank() == 1 ? 2 : 1,
                              .kind = K::all_reduce},
                             "unit", {});
      group.device().synchronize();
      world.barrier();
    });
    INFO(name(executor));
    for (const std::string& message : messages)
      CHECK_THAT(message,
                 Contains("communicator 'control of odd', call 1: rank 3 submitted 'unit'") &&
                     Contains("but rank 1 submitted 'unit'") && Contains("all_reduce of 2 x f32"));
  }
}

TEST_CASE("calls of a group and of the world around it come in one order", "[comm][threads]") {
  for (const ExecutorChoice& executor : testing::threaded_and_shuffled()) {
    const auto messages = heard(3, {.executor = executor, .threads = 1}, [](World& world) {
      const RankGroup* pair = split(world, "pair", {{1, 2}});
      // On streams of their own, where the ranks would meet in either order.
      if (world.rank() == 2) pair->gather().submit(barrier_item(), "first", {});
      world.reduce().submit(barrier_item(), "second", {});
      if (world.rank() == 1) pair->gather().submit(barrier_item(), "first", {});
      world.barrier();  // rank 0 would be gone where the others have met in "second" before
    });
    INFO(name(executor));
    for (const std::string& message : messages)
      CHECK_THAT(message,
                 Contains("'first' on 'gather of pair'") || Contains("'gather of pair', call 1"));
    for (const std::string& message : messages)
      CHECK_THAT(message,
                 Contains("rank 1 has submitted 2 calls of the groups around this one, rank 2 1"));
  }
}

TEST_CASE("whoever fails, ends or is late within a group is named to all ranks",
          "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    INFO(name(executor));
    const WorldOptions options{.executor = executor, .threads = 1};
    const auto run = [&](const WorldOptions& with, const std::function<void(const RankGroup&)>& f) {
      return heard(4, with, [&](World& world) {
        f(*split(world, "pair", {{0, 1}, {2, 3}}));
        world.barrier();
      });
    };
    auto messages = run(options, [](const RankGroup& pair) {
      if (pair.ranks()[0] == 2 && pair.rank() == 1) throw std::runtime_error("no luck");
      pair.barrier();
    });
    CHECK(messages[3] == "no luck");
    for (int rank = 0; rank < 3; ++rank)
      CHECK_THAT(messages[at(rank)], Contains("rank 3 failed: no luck"));
    messages = heard(4, options, [&](World& world) {
      const RankGroup& pair = *split(world, "pair", {{0, 1}, {2, 3}});
      if (world.rank() != 2) pair.barrier();
    });
    CHECK_THAT(messages[3], Contains("rank 2 has ended after 0 calls on communicator 'control of "
                                     "pair', but rank 3 submitted call 1 there"));
    if (executor.make_scheduler) continue;  // knows no timeout
    std::atomic<int> given_up{0};
    messages =
        heard(4, {.executor = executor, .threads = 1, .timeout_seconds = 0.3}, [&](World& world) {
          const RankGroup& pair = *split(world, "pair", {{0, 1}, {2, 3}});
          while (world.rank() != 3 && given_up == 0)  // rank 3 alone waits, so it is what is late
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          try {
            pair.barrier();
          } catch (const CommError&) {
            ++given_up;
            throw;
          }
        });
    CHECK_THAT(messages[3], Contains("'barrier' on 'control of pair' (barrier), has taken 0.3 s: "
                                     "missing are ranks 2;"));
  }
}

TEST_CASE("groups go on after a recovery of their world", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    run_checked(4, {.executor = executor, .threads = 1}, [](World& world) {
      const RankGroup& pair = *split(world, "pair", {{0, 3}, {1, 2}});
      for (int round = 0; round < 8; ++round) {
        try {
          pair.sum(1);
          if (world.rank() == round % 4) throw std::runtime_error("no luck");
          pair.sum(2);  // calls that the thrower never makes
          world.sum(3);
        } catch (const std::exception&) {
          world.recover();
        }
        must(pair.flight_recorder().last_submitted() == 0, "calls count from the beginning");
        must(pair.sum(world.rank()) == 3, "the sum is right");
        pair.allocate_symmetric(4096 * (1 + round));
        must(world.sum(world.rank()) == 6, "and the world's");
      }
    });
}

TEST_CASE("a group without peers has its own size and costs", "[comm]") {
  for (const ExecutorKind executor : {ExecutorKind::inlined, ExecutorKind::virtual_}) {
    World world = World::emulated(5, 8, {.executor = executor});
    const RankGroup& group = *world.split("dp_shard", Ranks{4, 5, 6, 7});
    CHECK(group.rank() == 1);
    CHECK(group.size() == 4);
    CHECK(group.sum(1.5) == 6);
    CHECK(world.sum(1.5) == 12);
    const auto first = world.allocate_symmetric(8192), second = group.allocate_symmetric(8192);
    CHECK(std::abs(first->data() - second->data()) >= 8192);  // also where nothing is touched
    group.gather().submit({.send = second->data() + 1024,
                           .recv = second->data(),
                           .count = 256,
                           .kind = K::all_gather},
                          "unit", {});
    world.device().synchronize();
    FlightEntry call;
    CHECK(group.flight_recorder().find(2, call));
    CHECK(call.to_string() == "'unit' on 'gather of dp_shard' (all_gather of 256 x f32)");
    CHECK(world.split("none", Ranks{}) == nullptr);
  }
}

TEST_CASE("a group of an ended world says so", "[comm]") {
  std::shared_ptr<const World> kept;
  const RankGroup* group = nullptr;
  {
    World world = World::emulated(0, 2);
    group = world.split("pair", Ranks{0, 1});
    kept = world.share();
  }
  CHECK_THROWS_WITH(group->sum(1), Contains("its World has ended"));
  CHECK_THROWS_WITH(group->allocate_symmetric(64), Contains("its World has ended"));
  CHECK_THROWS_WITH(kept->split("other", Ranks{0, 1}), Contains("its World has ended"));
}
