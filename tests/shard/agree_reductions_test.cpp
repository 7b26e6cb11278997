// Ranks that differ in which backwards reduce, or leave one out: each of them is told, also where
// no gather tells.
#include "tests/shard/micro_batches.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

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
              Contains(
                  "the part in parentheses comes from calls that all ranks must make, or none"));
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
