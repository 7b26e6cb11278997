// Loss scaling on one rank, against PyTorch's rules: which steps are taken, what the scale becomes,
// and what is refused. Over ranks: tests/shard/optim_grad_scaler_test.
#include <algorithm>
#include <limits>

#include "tessera/device/device_context.hpp"
#include "tessera/device/observer.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/optim/helpers.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

const std::vector<Shape> kScaledShapes{{5, 7}, {3}, {129}};

// Backward of scale * sum(p * g): gradients of scale * g, exactly for a power of two.
void give_scaled(const optim::GradScaler& scaler, const Bag& bag,
                 const std::map<std::size_t, Values>& gradients) {
  Tensor loss;
  for (const auto& [i, g] : gradients) {
    const Parameter& p = bag.items[i];
    const Tensor part = sum(p.value() * Tensor::from(g, p.shape(), p.shard().device()));
    loss = loss.defined() ? loss + part : part;
  }
  scaler.scale(loss).backward();
}

struct Scaled {
  explicit Scaled(const optim::GradScalerOptions& options = {.init_scale = 1024})
      : scaler(device, options) {
    for (Bag* b : {&bag, &plain}) b->materialize(device);
    for (std::size_t i = 0; i < kScaledShapes.size(); ++i) {
      const Values values = draw.values(kScaledShapes[i].numel(), 0.1f, 2);
      for (const Bag* b : {&bag, &plain}) set(b->items[i], values);
    }
  }
  std::map<std::size_t, Values> gradients(const std::vector<std::size_t>& of = {0, 1, 2}) {
    std::map<std::size_t, Values> out;
    for (const std::size_t i : of) out[i] = draw.values(kScaledShapes[i].numel(), 0.5f, 2);
    return out;
  }
  // Whether parameters and moments are those of the plain training, bit by bit.
  bool is_plain(optim::Optimizer& with, optim::Optimizer& without) const {
    for (std::size_t i = 0; i < bag.items.size(); ++i) {
      if (get(bag.items[i]) != get(plain.items[i])) return false;
      const auto a = with.moments(bag.items[i]), b = without.moments(plain.items[i]);
      for (std::size_t k = 0; k < a.size(); ++k)
        if (a[k].to_vector<float>() != b[k].to_vector<float>()) return false;
    }
    return with.steps() == without.steps();
  }
  double scale() const { return scaler.current_scale().item(); }

  Draw draw;
  Device device = Device::cpu();
  Bag bag{kScaledShapes}, plain{kScaledShapes};
  optim::GradScaler scaler;
};

}  // namespace

TEST_CASE("steps that overflow are skipped, and the scale follows PyTorch's rules", "[optim]") {
  Scaled s({.init_scale = 1024, .growth_factor = 4, .growth_interval = 3});
  INFO("seed " << s.draw.seed);
  optim::AdamW with(s.bag.parameters()), without(s.plain.parameters());
  double scale = 1024;
  int tracker = 0, skipped = 0;
  for (int k = 0; k < 40; ++k) {
    auto gradients = s.gradients();
    const bool overflows = s.draw.engine() % 4 == 0 || k == 0;
    if (overflows) {
      Values& bad = gradients[s.draw.engine() % 3];
      bad[s.draw.engine() % bad.size()] = s.draw.engine() % 2 == 0 ? INFINITY : NAN;
    } else {
      give_gradients(s.plain, gradients);
      without.step();
      without.zero_grad();
    }
    give_scaled(s.scaler, s.bag, gradients);
    s.scaler.step(with);
    REQUIRE((s.scaler.found_inf(with).item() != 0) == overflows);
    s.scaler.update();
    with.zero_grad();
    skipped += overflows;
    // torch.amp.GradScaler, _amp_update_scale_.
    tracker = overflows ? 0 : tracker + 1;
    if (overflows) scale *= 0.5;
    if (tracker == 3) {
      scale *= 4;
      tracker = 0;
    }
    REQUIRE(s.scale() == scale);
    if (k % 3 == 0) REQUIRE(with.steps() == k + 1 - skipped);
  }
  CHECK(s.is_plain(with, without));
}

TEST_CASE("gradients are unscaled once, and may be clipped between", "[optim]") {
  Scaled s;
  INFO("seed " << s.draw.seed);
  optim::AdamW with(s.bag.parameters()), without(s.plain.parameters());
  for (const bool clips : {true, false, true}) {
    const auto gradients = s.gradients();
    give_gradients(s.plain, gradients);
    give_scaled(s.scaler, s.bag, gradients);
    s.scaler.unscale(with);
    for (const auto& [i, g] : gradients) CHECK(s.bag.items[i].grad().to_vector<float>() == g);
    if (clips) {
      const double norm = optim::clip_grad_norm(s.bag.parameters(), 1).item();
      CHECK(norm == optim::clip_grad_norm(s.plain.parameters(), 1).item());
    }
    s.scaler.step(with);
    s.scaler.update();
    without.step();
    with.zero_grad();
    without.zero_grad();
  }
  CHECK(s.is_plain(with, without));
}

TEST_CASE("of several optimizers those are skipped whose own gradients overflowed", "[optim]") {
  Scaled s;
  INFO("seed " << s.draw.seed);
  optim::AdamW first({s.bag.items[0], s.bag.items[1]}), second({s.bag.items[2]}),
      plain({s.plain.items[2]});
  auto gradients = s.gradients();
  gradients[1][2] = INFINITY;
  give_gradients(s.plain, gradients);
  give_scaled(s.scaler, s.bag, gradients);
  const bool is_bad_one_first = GENERATE(true, false);
  for (const bool is_first : {is_bad_one_first, !is_bad_one_first})
    s.scaler.step(is_first ? first : second);
  s.scaler.update();
  plain.step();
  CHECK(get(s.bag.items[0]) == get(s.plain.items[0]));
  CHECK(get(s.bag.items[1]) == get(s.plain.items[1]));
  CHECK(get(s.bag.items[2]) == get(s.plain.items[2]));
  CHECK(first.steps() == 0);
  CHECK(second.steps() == 1);
  CHECK(s.scale() == 512);
}

TEST_CASE("parameters without a gradient stay, and a step without any counts as finite",
          "[optim]") {
  Scaled s({.init_scale = 1024, .growth_interval = 2});
  INFO("seed " << s.draw.seed);
  optim::AdamW with(s.bag.parameters()), without(s.plain.parameters());
  const Values before = get(s.bag.items[1]);
  const auto gradients = s.gradients({0, 2});
  give_gradients(s.plain, gradients);
  give_scaled(s.scaler, s.bag, gradients);
  for (int k = 0; k < 2; ++k) {
    s.scaler.step(with);
    s.scaler.update();
    without.step();
    with.zero_grad();
    without.zero_grad();
  }
  CHECK(get(s.bag.items[1]) == before);
  CHECK(s.is_plain(with, without));
  CHECK(s.scale() == 2048);
}

TEST_CASE("gradients add up over micro-batches, and a skipped step's are dropped", "[optim]") {
  Scaled s;
  INFO("seed " << s.draw.seed);
  optim::AdamW with(s.bag.parameters()), without(s.plain.parameters());
  for (const bool overflows : {false, true, false}) {
    for (int m = 0; m < 3; ++m) {
      auto gradients = s.gradients();
      if (!overflows) give_gradients(s.plain, gradients);
      if (overflows && m == 1) gradients[0][4] = -INFINITY;
      give_scaled(s.scaler, s.bag, gradients);
    }
    s.scaler.step(with);
    s.scaler.update();
    with.zero_grad();
    if (!overflows) without.step();
    without.zero_grad();
  }
  CHECK(s.is_plain(with, without));
}

TEST_CASE("the scale never becomes infinite, and largest finite gradients are finite", "[optim]") {
  Scaled s({.init_scale = 0x1p127, .growth_interval = 1});
  optim::AdamW with(s.bag.parameters());
  for (const double expected : {0x1p127, 0x1p127, 0x1p126}) {
    auto gradients = s.gradients();
    for (auto& [i, g] : gradients) std::ranges::fill(g, std::numeric_limits<float>::min());
    // Of 129, all as large as an f32 is: their squares sum to 1e79.
    std::ranges::fill(gradients[2], std::numeric_limits<float>::max() / 0x1p127f);
    if (expected < 0x1p127) gradients[2][0] *= 2;
    give_scaled(s.scaler, s.bag, gradients);
    s.scaler.step(with);
    s.scaler.update();
    with.zero_grad();
    CHECK(s.scale() == expected);
  }
}

TEST_CASE("the scale never becomes so small that its inverse is infinite", "[optim]") {
  constexpr double kLeast = std::numeric_limits<float>::min();
  Scaled s({.init_scale = kLeast * 4, .growth_interval = 1});
  optim::AdamW with(s.bag.parameters());
  const auto step = [&](bool is_bad) {
    auto gradients = s.gradients();
    if (is_bad) gradients[2][0] = std::numeric_limits<float>::infinity();
    give_scaled(s.scaler, s.bag, gradients);
    s.scaler.step(with);
    s.scaler.update();
    with.zero_grad();
    return s.scale();
  };
  for (const double expected : {kLeast * 2, kLeast, kLeast, kLeast}) CHECK(step(true) == expected);
  CHECK(with.steps() == 0);
  CHECK(step(false) == kLeast * 2);
  CHECK(with.steps() == 1);
  for (const Parameter& p : s.bag.items)
    for (const float value : get(p)) CHECK(std::isfinite(value));
}

TEST_CASE("a scaled step blocks the host for nothing but the count of the step before", "[optim]") {
  struct Blocks final : Observer {
    void blocked(const Event& event) override { ticks.push_back(event.tick); }
    std::vector<Tick> ticks;
  };
  Scaled s;
  optim::AdamW optimizer(s.bag.parameters());
  const auto step = [&] {
    give_scaled(s.scaler, s.bag, s.gradients());
    s.scaler.unscale(optimizer);
    optim::clip_grad_norm(s.bag.parameters(), 1);
    s.scaler.step(optimizer);
    const Tick end = s.device.compute().clock()[StreamId::compute];
    s.scaler.update();
    optimizer.zero_grad();
    return end;
  };
  const auto blocks = std::make_shared<Blocks>();
  s.device.synchronize();
  s.device.context().add_observer(blocks);
  const Tick first = step();
  CHECK(blocks->ticks.empty());
  const Tick second = step();
  CHECK(blocks->ticks == std::vector<Tick>{first});
  CHECK(optimizer.steps() == 2);
  CHECK(blocks->ticks == std::vector<Tick>{first, second});
  CHECK(optimizer.steps() == 2);  // which is known by now
  CHECK(blocks->ticks.size() == 2);
}

TEST_CASE("a loss of 16 bits is scaled in f32", "[optim]") {
  const Device device = Device::cpu();
  const optim::GradScaler scaler(device);
  const Tensor loss = raw::cast(Tensor::full({2}, 3, f32, device), f16);
  const Tensor scaled = scaler.scale(loss);
  CHECK(scaled.dtype() == f32);
  CHECK(scaled.to_vector<float>() == Values(2, 3 * 65536.f));
  CHECK(scaler.scale(raw::cast(loss, f64)).dtype() == f64);
}

TEST_CASE("calls of a scaler that make no step are refused in one line", "[optim]") {
  Scaled s;
  optim::AdamW optimizer(s.bag.parameters()), other({s.bag.items[0]});
  CHECK_THAT(thrown_by([&] { s.scaler.update(); }), Contains("no optimizer was unscaled"));
  CHECK_THAT(thrown_by([&] { s.scaler.found_inf(optimizer); }), Contains("were not unscaled"));
  give_scaled(s.scaler, s.bag, s.gradients());
  s.scaler.unscale(optimizer);
  CHECK_THAT(thrown_by([&] { s.scaler.unscale(optimizer); }), Contains("gradients were unscaled"));
  s.scaler.step(optimizer);
  CHECK_THAT(thrown_by([&] { s.scaler.step(optimizer); }),
             Contains("step was taken since the last update(); call update() between"));
  CHECK_THAT(thrown_by([&] { s.scaler.unscale(optimizer); }), Contains("step was taken"));
  s.scaler.update();
  CHECK_THAT(thrown_by([&] { s.scaler.update(); }), Contains("no optimizer was unscaled"));
  s.scaler.step(optimizer);  // and on it goes
  s.scaler.update();
  CHECK(optimizer.steps() == 2);

  const Device elsewhere = Device::cpu();
  optim::GradScaler far(elsewhere);
  CHECK_THAT(thrown_by([&] { far.unscale(optimizer); }), Contains("on another device"));
  CHECK_THAT(thrown_by([&] { optimizer.step_if(Tensor::ones({}, f32, s.device)); }),
             Contains("step_if: the condition is f32"));
  const Tensor far_away = raw::logical_not(Tensor::zeros({}, f32, elsewhere));
  CHECK_THAT(thrown_by([&] { optimizer.step_if(far_away); }), Contains("lies on another device"));
  CHECK_THAT(thrown_by([] { optim::GradScaler{Device::meta()}; }), Contains("meta"));
}

TEST_CASE("a scaler refuses factors that are none", "[optim]") {
  const Device device = Device::cpu();
  const auto refusal = [&](const optim::GradScalerOptions& options) {
    return thrown_by([&] { optim::GradScaler(device, options); });
  };
  for (const double bad : {0.0, -1.0, 1e-60, 1e-38, 1e60, double{INFINITY}, double{NAN}})
    CHECK_THAT(refusal({.init_scale = bad}), Contains("the scale is"));
  for (const double bad : {1.0, 0.5, double{INFINITY}, double{NAN}})
    CHECK_THAT(refusal({.growth_factor = bad}), Contains("growth_factor is"));
  for (const double bad : {0.0, 1.0, -0.5, double{NAN}})
    CHECK_THAT(refusal({.backoff_factor = bad}), Contains("backoff_factor is"));
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 25})
    CHECK_THAT(refusal({.growth_interval = bad}), Contains("growth_interval is"));
}

TEST_CASE("a scaler that is loaded goes on as the one that was saved", "[optim]") {
  Scaled s({.init_scale = 1024, .growth_factor = 4, .growth_interval = 3});
  INFO("seed " << s.draw.seed);
  optim::AdamW optimizer(s.bag.parameters());
  const auto step = [&](optim::GradScaler& scaler, bool overflows) {
    auto gradients = s.gradients();
    if (overflows) gradients[0][0] = INFINITY;
    give_scaled(scaler, s.bag, gradients);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    return scaler.current_scale().item();
  };
  for (const bool overflows : {true, false, false}) step(s.scaler, overflows);
  const StateDict state = s.scaler.state_dict();
  std::map<std::string, double> values;
  for (const auto& [name, entry] : state) values[name] = entry.values.item();
  CHECK(values == std::map<std::string, double>{{"scale", 512},
                                                {"growth_factor", 4},
                                                {"backoff_factor", 0.5},
                                                {"growth_interval", 3},
                                                {"growth_tracker", 2}});
  optim::GradScaler other(s.device);
  other.load(state);
  CHECK(step(other, false) == 2048);
  CHECK(step(s.scaler, false) == 2048);

  for (const auto& [name, bad] : std::map<std::string, double>{{"scale", NAN},
                                                               {"growth_factor", 1},
                                                               {"backoff_factor", 2},
                                                               {"growth_interval", 0},
                                                               {"growth_tracker", -1}}) {
    StateDict wrong = state;
    const DType dtype = state.at(name).values.dtype();
    wrong.at(name) = StateTensor(Tensor::full({}, bad, dtype, s.device));
    CHECK_THAT(thrown_by([&] { other.load(wrong); }), Contains(name));
    wrong.erase(name);
    CHECK_THAT(thrown_by([&] { other.load(wrong); }), Contains("'" + name + "'"));
    CHECK(other.current_scale().item() == 2048);
  }
}
