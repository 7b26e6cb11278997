// What a program decides about units: programs of random decisions beside the same training without
// any, and what may not be decided.
#include <random>

#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("decisions at random change no bit of what is trained", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 20; ++trial) {
    const std::uint64_t program = random();
    const int ranks = 1 + static_cast<int>(random() % 3);
    const Reshard way = kReshards[random() % 3];
    const DType param = random() % 3 == 0 ? bf16 : f32;
    INFO("program " << program << ", " << ranks << " ranks");
    const auto seen = on_ranks(ranks, [&](World& world) {
      const std::vector<std::int64_t> widths{4, 6, 5, 3, 4, 4};
      TrainedStack t(world, way, widths, param), plain(world, way, widths, param);
      const auto below = [](std::mt19937_64& dice, std::size_t n) { return dice() % n; };
      const auto step = [&](std::uint64_t number, bool decides) {
        std::mt19937_64 dice(program ^ number);
        std::mt19937_64 kind(program * 31 + number);
        TrainedStack& one = decides ? t : plain;
        const auto any = [&]() -> nn::Module& {
          const std::size_t i = below(dice, 6);
          if (i == 5) return one.model;
          return one.layer(i);
        };
        const auto decide = [&] {
          for (auto left = below(dice, 4); decides && left > 0; --left) {
            nn::Module& module = any();
            const auto what = below(dice, 8);
            if (what <= 2) unshard(module);
            if (what == 2)
              for (const auto& [name, p] : module.own_parameters()) p.value();
            if (what == 3) reshard(module);
            if (what == 4)
              set_reshard_after_forward(module, kReshards[below(dice, 3)], below(dice, 2) == 0);
            if (what == 5)
              set_reshard_after_backward(module, below(dice, 2) == 0, below(dice, 2) == 0);
            if (what >= 6) {
              std::vector<nn::Module*> list;
              for (auto n = below(dice, 3); n > 0; --n) list.push_back(&any());
              what == 6 ? set_modules_to_forward_prefetch(module, list)
                        : set_modules_to_backward_prefetch(module, list);
            }
          }
        };
        decide();
        const int micro = 1 + static_cast<int>(below(kind, 2));
        const bool ahead = below(kind, 3) == 0, evaluates = below(kind, 3) == 0,
                   reduces_once = below(kind, 2) == 0;
        std::vector<Tensor> losses;
        const auto backward = [&](int m) {
          set_requires_gradient_sync(one.model, !reduces_once || m + 1 == micro);
          std::exchange(losses[static_cast<std::size_t>(m)], {}).backward();
        };
        for (int m = 0; m < micro; ++m) {
          losses.push_back(one.loss(number + static_cast<std::uint64_t>(m)));
          decide();
          if (!ahead) backward(m);
          decide();
        }
        for (int m = 0; ahead && m < micro; ++m) backward(m);
        decide();
        one.update();
        if (!evaluates) return;
        const NoGradGuard no_gradient;
        decide();
        one.loss();
      };
      // The root runs first, so that all units may be unsharded.
      for (TrainedStack* const one : {&t, &plain}) one->loss().backward(), one->update();
      for (std::uint64_t k = 0; k < 12; ++k) {
        step(k, true);
        step(k, false);
      }
      return same_bits(full_values(t.model), full_values(plain.model));
    });
    for (const bool is_same : seen) CHECK(is_same);
  }
}

TEST_CASE("a way that is set again as it is makes no plan", "[threads]") {
  for (const std::uint64_t plans : on_ranks(2, [](World& world) {
         TrainedStack t(world, Reshard::always);
         for (int step = 0; step < 3; ++step) {
           set_reshard_after_forward(t.model, Reshard::always);
           t.loss().backward();
           t.update();
         }
         return shard_counters(t.model).slot_plans;
       }))
    CHECK(plans == 0);
}

TEST_CASE("nothing is decided in the middle of a call or a backward pass") {
  const auto found = on_ranks(2, [](World& world) {
    Stack model({5, 7, 3});
    start(model, world, 5);
    std::vector<std::string> said;
    const auto decide = [&](nn::Module& unit) {
      said.push_back(thrown_by([&] { set_reductions_in_flight(unit, 2); }));
      said.push_back(thrown_by([&] { set_reshard_after_forward(unit, Reshard::never); }));
      said.push_back(thrown_by([&] { set_reshard_after_backward(unit, false); }));
      said.push_back(thrown_by([&] { set_unshard_in_backward(unit, true); }));
      said.push_back(thrown_by([&] { set_requires_gradient_sync(unit, false); }));
      said.push_back(thrown_by([&] { set_requires_all_reduce(unit, false); }));
      said.push_back(thrown_by([&] { set_gradient_divide_factor(unit, 1); }));
      said.push_back(thrown_by([&] { set_modules_to_forward_prefetch(unit, {}); }));
      said.push_back(thrown_by([&] { set_modules_to_backward_prefetch(unit, {}); }));
    };
    run_within_step(model, rows_of(1, world.rank(), 1, 5, world.device()), [&] {
      decide(model.layers[0]);
      decide(model);
    });
    return said;
  });
  for (const auto& said : found) {
    REQUIRE(said.size() == 4 * 9);
    for (std::size_t i = 0; i < said.size(); ++i)
      CHECK_THAT(said[i], Contains(concat("of unit '", i / 9 % 2 == 0 ? "layers.0" : "(root)",
                                          "' is running; call ")) &&
                              Contains(" between steps"));
  }
}
