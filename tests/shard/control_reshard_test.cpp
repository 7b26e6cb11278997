// How long units stay open as a program decides it while it runs: behind forward, behind backward,
// and whether backward gathers them.
#include "tessera/nn/embedding.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("whether units are gathered for backward may change between steps",
          "[threads][fsdp2-071]") {
  struct Row {
    Reshard first, then;
    bool recurse;
    std::uint64_t backward;
  };
  // Four units; what is called last stays where the way is automatic.
  const Row table[] = {{Reshard::never, Reshard::always, true, 4},
                       {Reshard::never, Reshard::always, false, 1},
                       {Reshard::always, Reshard::never, true, 0},
                       {Reshard::always, Reshard::never, false, 3},
                       {Reshard::always, Reshard::automatic, true, 2},
                       {Reshard::never, Reshard::automatic, false, 0}};
  for (const Row& row : table) {
    INFO(row.first << " to " << row.then << ", " << row.recurse);
    const auto seen = on_ranks(2, [&](World& world) {
      TrainedStack t(world, row.first);
      const auto step = [&] {
        const Tensor loss = t.loss();
        const std::uint64_t gathers = t.gathers_of([&] { loss.backward(); });
        t.update();
        return gathers;
      };
      std::vector<std::uint64_t> unplanned, backward;
      for (int round = 0; round < 6; ++round) {
        set_reshard_after_forward(t.model, row.first);
        step();
        set_reshard_after_forward(t.model, row.then, row.recurse);
        backward.push_back(step());
        unplanned.push_back(shard_counters(t.model).unplanned_slots);
      }
      return std::pair(backward, unplanned);
    });
    for (const auto& [backward, unplanned] : seen) {
      CHECK(backward.back() == row.backward);
      CHECK(unplanned[3] == unplanned.back());  // the alternation has come to rest
    }
  }
}

TEST_CASE("units that backward leaves open are gathered once for several micro-batches",
          "[threads][fsdp2-044]") {
  constexpr int kSteps = 16;  // some until the way of stepping has come to rest
  for (const Reshard way : kReshards) {
    const auto seen = on_ranks(2, [&](World& world) {
      TrainedStack t(world, way), plain(world, way);
      set_reshard_after_backward(t.model, false);
      std::vector<std::uint64_t> gathers, unplanned;
      for (int k = 0; k < kSteps; ++k) {
        gathers.push_back(t.gathers_of([&] {
          for (std::uint64_t micro = 0; micro < 3; ++micro) t.loss(7 + micro).backward();
        }));
        for (std::uint64_t micro = 0; micro < 3; ++micro) plain.loss(7 + micro).backward();
        t.update();
        plain.update();
        unplanned.push_back(shard_counters(t.model).unplanned_slots);
      }
      const bool is_same = same_bits(full_values(t.model), full_values(plain.model));
      set_reshard_after_backward(t.model, true);
      t.loss().backward();
      return std::tuple(gathers, unplanned, is_same, thrown_by([&] { t.first_weight(); }));
    });
    for (const auto& [gathers, unplanned, is_same, closed] : seen) {
      if (way == Reshard::never) CHECK(gathers == std::vector<std::uint64_t>(kSteps, 4));
      if (way == Reshard::always) CHECK(gathers == std::vector<std::uint64_t>(kSteps, 4 + 3 * 4));
      CHECK(unplanned[kSteps - 3] == unplanned.back());
      CHECK(is_same);
      CHECK_THAT(closed, Contains("while the unit is closed"));
    }
  }
}

TEST_CASE("a unit is gathered once for all chunks of a loss, where the flags say so",
          "[threads][fsdp2-056]") {
  for (const auto& [gathers, closed] : on_ranks(2, [&](World& world) {
         TrainedStack t(world, Reshard::always);
         t.loss().backward();  // the root runs first
         set_reshard_after_forward(t.layer(2), Reshard::never);
         set_reshard_after_backward(t.layer(2), false);
         const std::uint64_t count = t.gathers_of([&] {
           for (int chunk = 0; chunk < 3; ++chunk)
             mean_square(t.layer(2)(rows_of(2, chunk, 1, 4, world.device()))).backward();
         });
         reshard(t.layer(2));
         return std::pair(count, thrown_by([&] { t.layer(2).weight.value(); }));
       })) {
    CHECK(gathers == 1);
    CHECK_THAT(closed, Contains("while the unit is closed"));
  }
}

TEST_CASE(
    "a list of norm and head is gathered once for all chunks of a loss, where the flags say so",
    "[threads][fsdp2-056]") {
  struct Chunked final : nn::Module {
    Chunked() { register_modules("trunk", trunk, "norm", norm, "head", head); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return chunk(trunk(x)); });
    }
    Tensor chunk(const Tensor& h) { return mean_square(head(norm(h))); }
    nn::Linear trunk{4, 4}, norm{4, 4}, head{4, 4};
  };
  for (const auto& [gathers, closed] : on_ranks(2, [](World& world) {
         Chunked m;
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .reshard_after_forward = Reshard::always};
         fully_shard(m.trunk, options);
         fully_shard({&m.norm, &m.head}, options);
         fully_shard(m, options);
         nn::init(m, {1}, world.device());
         m(rows_of(1, 0, 2, 4, world.device())).backward();  // the root runs first
         set_reshard_after_forward(m.norm, Reshard::never);
         set_reshard_after_backward(m.norm, false);
         const std::uint64_t before = shard_counters(m).gathers;
         for (int chunk = 0; chunk < 3; ++chunk)
           m.chunk(rows_of(2, chunk, 1, 4, world.device())).backward();
         const std::uint64_t count = shard_counters(m).gathers - before;
         reshard(m.norm);
         return std::pair(count, thrown_by([&] { m.head.weight.value(); }));
       })) {
    CHECK(gathers == 1);
    CHECK_THAT(closed, Contains("while the unit is closed"));
  }
}

TEST_CASE("what stays open for backward does so behind a unit that is called by itself",
          "[threads]") {
  for (const std::uint64_t gathers : on_ranks(2, [](World& world) {
         TrainedStack t(world, Reshard::never);
         t.loss().backward();
         const Tensor h = t.model(rows_of(1, 2 * world.rank(), 2, 4, world.device()));
         const Tensor loss = mean_square(t.layer(2)(h));
         return t.gathers_of([&] { loss.backward(); });
       }))
    CHECK(gathers == 1);  // of that unit, for its first call
}

TEST_CASE("the slices of a table stay open and are closed as their unit is told to", "[threads]") {
  for (const auto& [plain, open, again] : on_ranks(2, [](World& world) {
         Tabled model;
         fully_shard(model, {.mesh = DeviceMesh::flat(world),
                             .reshard_after_forward = Reshard::always,
                             .slice_bytes = 1});
         nn::init(model, {1}, world.device());
         const auto gathers = [&] {
           const std::uint64_t before = shard_counters(model).gathers;
           for (int micro = 0; micro < 2; ++micro)
             mean_square(model(Tensor::arange(6, i64, world.device()))).backward();
           return shard_counters(model).gathers - before;
         };
         const std::uint64_t first = gathers();
         set_reshard_after_forward(model, Reshard::never);
         set_reshard_after_backward(model, false);
         gathers();
         const std::uint64_t none = gathers();
         set_reshard_after_forward(model, Reshard::always);
         set_reshard_after_backward(model, true);
         gathers();
         return std::tuple(first, none, gathers());
       })) {
    CHECK(plain == 2 * (3 + 2));  // three slices, which backward does not read
    CHECK(open == 0);
    CHECK(again == plain);
  }
}

TEST_CASE("whether backward gathers a unit may change, and is an error where it reads it",
          "[threads]") {
  struct Shifted final : nn::Module {
    Shifted() { register_modules("layer", layer, "shift", shift, "head", head); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return head(shift(layer(x))); });
    }
    nn::Linear layer{4, 4}, head{4, 4};
    Shift shift{4};  // of which backward reads nothing
  };
  for (const auto& [read, unread, wrong] : on_ranks(2, [](World& world) {
         Shifted model;
         const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                    .reshard_after_forward = Reshard::always};
         shard_each({&model.layer, &model.shift, &model.head, &model}, options);
         nn::init(model, {1}, world.device());
         const auto gathers = [&] {
           const std::uint64_t before = shard_counters(model).gathers;
           mean_square(model(rows_of(1, 0, 2, 4, world.device()))).backward();
           return shard_counters(model).gathers - before;
         };
         const std::uint64_t all = gathers();
         set_unshard_in_backward(model.shift, false);
         const std::uint64_t without = gathers();
         set_unshard_in_backward(model.head, false);
         return std::tuple(all, without, thrown_by(gathers));
       })) {
    CHECK(read == 6);
    CHECK(unread == 5);
    CHECK_THAT(wrong, Contains("of shape [") && Contains("reads_parameters_in_backward"));
  }
}
