// Learning-rate factors against their closed forms.
#include "tessera/optim/schedule.hpp"

#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using optim::DecayType;
using optim::lr_factor;
using optim::Schedule;

namespace {

// Fewer than ten roundings, on either side, of numbers of at most pi: 10 * 2^-53 * 2.
constexpr double kRounding = 2.3e-15;

}  // namespace

TEST_CASE("without warm-up and decay the rate is constant", "[optim]") {
  for (const std::int64_t step : {0, 1, 50, 99, 1000}) CHECK(lr_factor({.steps = 100}, step) == 1);
}

TEST_CASE("warm-up rises in equal steps and ends at 1", "[optim]") {
  const Schedule s{.steps = 20, .warmup_steps = 4};
  CHECK(lr_factor(s, 0) == 0.25);
  CHECK(lr_factor(s, 1) == 0.5);
  CHECK(lr_factor(s, 2) == 0.75);
  for (std::int64_t step = 3; step < 20; ++step) CHECK(lr_factor(s, step) == 1);
  // A warm-up longer than the training is cut to it.
  CHECK(lr_factor({.steps = 4, .warmup_steps = 100}, 3) == 1);
}

TEST_CASE("decay falls over the last part, by its form, towards the minimum", "[optim]") {
  // 100 steps, the last 40 decay: step 61 is the first below 1, at 1/40 of the way.
  Schedule s{.steps = 100, .warmup_steps = 10, .decay_ratio = 0.4};
  const auto progress = [](std::int64_t step) { return static_cast<double>(step - 60) / 40; };
  for (const double minimum : {0.0, 0.1}) {
    s.min_lr_factor = minimum;
    for (const std::int64_t step : {61, 70, 85, 99}) {
      const auto mixed = [&](double left) { return minimum + (1 - minimum) * left; };
      const double x = progress(step);
      INFO("step " << step << ", minimum " << minimum);
      s.decay_type = DecayType::linear;
      CHECK(lr_factor(s, step) == Approx(mixed(1 - x)).margin(kRounding));
      s.decay_type = DecayType::sqrt;
      CHECK(lr_factor(s, step) == Approx(mixed(1 - std::sqrt(x))).margin(kRounding));
      s.decay_type = DecayType::cosine;
      CHECK(lr_factor(s, step) ==
            Approx(mixed((1 + std::cos(3.14159265358979323846 * x)) / 2)).margin(kRounding));
    }
    CHECK(lr_factor(s, 60) == 1);
    CHECK(lr_factor(s, 10) == 1);
    CHECK(lr_factor(s, 100) == Approx(minimum).margin(kRounding));  // beyond the last step
  }
}

TEST_CASE("an unset ratio decays all that follows the warm-up; halves round to even", "[optim]") {
  const Schedule whole{.steps = 12, .warmup_steps = 2, .decay_type = DecayType::linear};
  CHECK(lr_factor(whole, 2) == 1);
  CHECK(lr_factor(whole, 3) == Approx(0.9).margin(kRounding));
  CHECK(lr_factor(whole, 11) == Approx(0.1).margin(kRounding));
  // 5 * 0.5 = 2.5 becomes 2, as Python rounds: steps 4 is half way, 3 is still 1.
  const Schedule half{.steps = 5, .decay_ratio = 0.5, .decay_type = DecayType::linear};
  CHECK(lr_factor(half, 3) == 1);
  CHECK(lr_factor(half, 4) == 0.5);
  // Decay and warm-up that do not both fit: the warm-up wins.
  const Schedule tight{
      .steps = 10, .warmup_steps = 6, .decay_ratio = 1.0, .decay_type = DecayType::linear};
  CHECK(lr_factor(tight, 5) == 1);
  CHECK(lr_factor(tight, 7) == Approx(0.75).margin(kRounding));
  const Schedule none{.steps = 10, .decay_ratio = 0.0, .decay_type = DecayType::cosine};
  CHECK(lr_factor(none, 9) == 1);
}

TEST_CASE("a schedule rises, stays and falls, and never leaves its bounds", "[optim]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 engine(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(engine() % n); };
  for (int round = 0; round < 300; ++round) {
    Schedule s{.steps = 1 + below(200)};
    s.warmup_steps = below(static_cast<std::uint64_t>(s.steps) + 20);
    if (below(2) == 1) s.decay_ratio = static_cast<double>(below(101)) / 100;
    s.decay_type = static_cast<DecayType>(below(4));
    s.min_lr_factor = static_cast<double>(below(101)) / 100;
    INFO("steps " << s.steps << ", warmup " << s.warmup_steps << ", decay "
                  << s.decay_ratio.value_or(-1) << ", type " << static_cast<int>(s.decay_type)
                  << ", minimum " << s.min_lr_factor);
    bool rises = true, stays = true, bounded = true;
    for (std::int64_t step = 0; step < s.steps; ++step) {
      const double now = lr_factor(s, step), next = lr_factor(s, step + 1);
      const bool warming = step + 1 < std::min(s.warmup_steps, s.steps);
      rises = rises && (!warming || next > now);
      stays = stays && (warming || step < s.warmup_steps || next <= now);
      bounded = bounded && now > 0 && now <= 1;
    }
    CHECK(rises);
    CHECK(stays);
    CHECK(bounded);
  }
  CHECK_THROWS_AS(lr_factor({.steps = 10}, -1), ContractError);
  CHECK_THROWS_AS(lr_factor({.steps = 10, .decay_ratio = 1.5}, 1), ContractError);
}

TEST_CASE("a schedule refuses a minimum that is negative or no number") {
  for (const double minimum : {-0.5, std::nan(""), static_cast<double>(INFINITY)})
    CHECK_THROWS_WITH(optim::lr_factor({.steps = 9, .min_lr_factor = minimum}, 0),
                      Catch::Matchers::Contains("min_lr_factor is "));
}
