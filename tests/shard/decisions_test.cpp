// Programs of random decisions, beside the same training without any; both reduce every
// micro-batch, or the last one only.
#include <random>

#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("decisions at random change no bit of what is trained", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 20; ++trial) {
    const std::uint64_t program = random();
    const int ranks = 1 + static_cast<int>(random() % 3);
    const Reshard way = kWays[random() % 3];
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
              set_reshard_after_forward(module, kWays[below(dice, 3)], below(dice, 2) == 0);
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
