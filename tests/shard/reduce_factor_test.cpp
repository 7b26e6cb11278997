// What gradients are divided by, as a program says it of each unit.
#include "tessera/nn/embedding.hpp"
#include "tests/shard/micro_batches.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

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

TEST_CASE("what is streamed is reduced by each backward, divided by its unit's factor",
          "[threads]") {
  const auto found = on_ranks(2, [](World& world) {
    const auto train = [&](bool syncs, double factor) {
      nn::Embedding table(8, 4);
      fully_shard(table, {.mesh = DeviceMesh::flat(world), .slice_bytes = 1});
      nn::init(table, {5}, world.device());
      set_gradient_divide_factor(table, factor);
      const Tensor tokens =
          Tensor::from(std::vector<std::int64_t>{1, 7, world.rank()}, {3}, world.device());
      for (const bool is_last : {false, true}) {
        set_requires_gradient_sync(table, syncs || is_last);
        mean_square(table(tokens)).backward();
        if (is_last && factor == 2) set_gradient_divide_factor(table, 4);
      }
      return std::pair(shard_gradients(table), shard_counters(table).reductions);
    };
    return std::array{train(true, 2), train(false, 2), train(true, 1)};
  });
  for (const auto& [at_once, later, sums] : found) {
    CHECK(same_bits(at_once.first, later.first));
    CHECK(at_once.second == later.second);
    std::vector<float> expected = sums.first.at("weight");
    for (float& g : expected) g /= 2;
    CHECK(same_bits(at_once.first.at("weight"), expected));
  }
}

TEST_CASE("ranks that divide their gradients by different factors are told both", "[threads]") {
  // With two replicas only the sum over them sees the difference: the ranks that shard agree.
  for (const auto& [replicas, first] : {std::pair(1, 3.), {2, 3.}, {1, 2.}, {2, 4.}}) {
    const int ranks = 2 * replicas;  // 2 and 4: the number of ranks, and not set
    std::vector<std::string> messages(static_cast<std::size_t>(ranks));
    CHECK_THROWS_AS(
        run_checked(ranks, {.threads = 1},
                    [&, replicas = replicas, first = first](World& world) {
                      Stack model({5, 7, 3});
                      model.shard({.mesh = mesh_of(world, replicas)});
                      nn::init(model, {11}, world.device());
                      shard_plan(model);  // so that ranks have agreed upon units before
                      const bool is_first = world.rank() < ranks / 2;
                      if (!is_first || first == 3)
                        set_gradient_divide_factor(model, is_first ? 3 : 5);
                      try {
                        mean_square(model(rows_of(1, 0, 1, 5, world.device()))).backward();
                        world.device().synchronize();
                      } catch (const CommError& error) {
                        messages[static_cast<std::size_t>(world.rank())] = error.what();
                        throw;
                      }
                    }),
        CommError);
    CAPTURE(replicas, first);
    for (const std::string& message : messages) {
      CHECK_THAT(message, Contains("divided by 5"));
      if (replicas == 2 || first == 3) CHECK_THAT(message, Contains(concat("divided by ", first)));
      CHECK_THAT(message, Contains(replicas == 1 ? "all_gather (root)" : "all_reduce (root)"));
    }
  }
}
