// AdamW and SGD against their formulas in f64, and whose parameters an optimizer moves. Moments:
// moments_test.
#include <algorithm>

#include "runtime/param/parameter_state.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/optim/fixture.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Step t of SGD on a reference.
void step_sgd(Reference& r, const Values& g, const optim::SGDOptions& o, int t) {
  for (std::size_t i = 0; i < r.p.size(); ++i) {
    const double step = g[i] + o.weight_decay * r.p[i];
    r.m[i] = o.momentum * r.m[i] + (t == 1 ? 1 : 1 - o.dampening) * step;
    r.p[i] -= o.lr * (o.nesterov ? step + o.momentum * r.m[i] : r.m[i]);
    r.largest = std::max(r.largest, std::abs(r.p[i]));
  }
}

}  // namespace

// Programs of before still compile, with a warning.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static_assert(std::is_same_v<optim::Sgd, optim::SGD> &&
              std::is_same_v<optim::SgdOptions, optim::SGDOptions>);
#pragma GCC diagnostic pop

TEST_CASE("AdamW follows its formula", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  const double beta2 = GENERATE(0.95, 0.999);
  const optim::AdamWOptions options{.lr = 0.01, .beta2 = beta2, .eps = 1e-3, .weight_decay = 0.1};
  optim::AdamW optimizer(f.bag.parameters(), options);  // before there is memory
  f.bag.materialize(f.device);
  f.start();
  const int steps = 12;
  for (int t = 1; t <= steps; ++t) {
    const auto gradients = f.gradients({0, 1, 2, 3, 4});
    give_gradients(f.bag, gradients);
    optimizer.step();
    optimizer.zero_grad();
    for (const auto& [i, g] : gradients) f.references[i].adamw(g, options, t);
  }
  CHECK(optimizer.steps() == steps);
  // p (1 - lr weight_decay) - update rounds the factor, the product and the difference: at most
  // 3 kEps |p| a step. The update is at most 4 lr, as |m'| is at most 2 and sqrt(v') at least 0.5.
  // Relative to that, in kEps: a term of m has seen t + 1 roundings, one of v t + 2, of which the
  // root leaves half; betas as f32 are off by 2^-25, which moves the weight of a term by t / (2 *
  // 0.9) at most, since corrections are made of the same betas; the rest are 12 single roundings.
  // (t + 1) + (t + 2) / 2 + 1.5 t / 1.8 + 12 is 42 for t = 12.
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const double allowed = steps * kEps * (3 * f.references[i].largest + 4 * options.lr * 42);
    INFO("parameter " << i << ", allowed " << allowed);
    CHECK(f.references[i].distance(get(f.bag.items[i])) <= allowed);
  }
}

TEST_CASE("SGD follows its formula, with and without momentum", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  const auto options = GENERATE(
      optim::SGDOptions{.lr = 0.01, .weight_decay = 0.1},
      optim::SGDOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1},
      optim::SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
      optim::SGDOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
  INFO("momentum " << options.momentum << ", dampening " << options.dampening);
  f.bag.materialize(f.device);
  f.start();
  optim::SGD optimizer(f.bag.parameters(), options);
  const int steps = 12;
  for (int t = 1; t <= steps; ++t) {
    const auto gradients = f.gradients({0, 1, 2, 3, 4});
    give_gradients(f.bag, gradients);
    optimizer.step();
    optimizer.zero_grad();
    for (const auto& [i, g] : gradients) step_sgd(f.references[i], g, options, t);
  }
  CHECK(optimizer.states()[0].moments.size() == (options.momentum > 0 ? 1u : 0u));
  // p stays below 4, so g + weight_decay p is at most 2.4 and the buffer b at most 2.4 * (1 -
  // 0.9^12) / 0.1 = 18. In kEps, b goes off by 65 more each step: 3 * 18, as it is rounded twice
  // and its momentum is off by 0.6; 2 * 2.4, as dampening is off and its product rounded; and 6
  // from p, whose own 12 * 5 come in with weight_decay. p - lr b rounds lr, product and difference:
  // |p| and lr (65 * 12 + 2 * 18), which is 816 lr. Nesterov's g + momentum b is as far off as b,
  // and is rounded once more: 18 lr.
  for (std::size_t i = 0; i < kShapes.size(); ++i)
    CHECK(f.references[i].distance(get(f.bag.items[i])) <=
          steps * kEps * (f.references[i].largest + options.lr * 834));
}

// What other optimizers do with it: clip_in_optimizer_test.
TEST_CASE("SGD multiplies by the coefficient that clipping leaves to it", "[optim]") {
  const double momentum = GENERATE(0.0, 0.9);
  Fixture f;
  INFO("seed " << f.draw.seed);
  Bag same(kShapes);
  same.materialize(f.device);
  f.bag.materialize(f.device);
  f.start();
  for (std::size_t i = 0; i < kShapes.size(); ++i) set(same.items[i], get(f.bag.items[i]));
  const optim::SGDOptions options{.lr = 0.1, .momentum = momentum, .weight_decay = 0.1};
  optim::SGD in_place(same.parameters(), options), leaves(f.bag.parameters(), options);
  for (int k = 0; k < 3; ++k) {
    const auto gradients = f.gradients({0, 1, 2, 3, 4});
    give_gradients(same, gradients);
    give_gradients(f.bag, gradients);
    const auto norm_of = [](Bag& bag, optim::Clip how) {
      return optim::clip_grad_norm(bag.parameters(), 0.5, optim::NormType::l2, how).item();
    };
    CHECK(norm_of(same, optim::Clip::in_place) == norm_of(f.bag, optim::Clip::in_optimizer));
    for (optim::SGD* const optimizer : {&in_place, &leaves}) {
      optimizer->step();
      optimizer->zero_grad();
    }
    for (std::size_t i = 0; i < kShapes.size(); ++i)
      CHECK(get(same.items[i]) == get(f.bag.items[i]));
  }
}

TEST_CASE("an optimizer touches its own parameters only, at the rate set last", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  f.start();
  optim::SGD optimizer({f.bag.items[1]}, {.lr = 1});
  optimizer.set_lr(0.25);
  CHECK(optimizer.lr() == 0.25);
  const auto gradients = f.gradients({0, 1});
  const Values other = get(f.bag.items[0]), before = get(f.bag.items[1]);
  give_gradients(f.bag, gradients);
  optimizer.step();
  CHECK(get(f.bag.items[0]) == other);
  const Values after = get(f.bag.items[1]);
  for (std::size_t i = 0; i < after.size(); ++i)  // 0.25 g is exact; one rounding
    CHECK(after[i] == before[i] - 0.25f * gradients.at(1)[i]);
}

TEST_CASE("weight decay can be another for some parameters", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  f.start();
  optim::SGD optimizer(f.bag.parameters(), {.lr = 0.5, .weight_decay = 0.5});
  optimizer.set_weight_decay({f.bag.items[1], f.bag.items[3]}, 0);
  optimizer.set_weight_decay({f.bag.items[3]}, 0.25);
  std::vector<Values> before;
  std::map<std::size_t, Values> gradients;
  for (std::size_t i = 0; i < f.bag.items.size(); ++i) {
    before.push_back(get(f.bag.items[i]));
    gradients[i] = Values(before[i].size(), 0);
  }
  give_gradients(f.bag, gradients);
  optimizer.step();
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Values after = get(f.bag.items[i]);
    const float kept = i == 1 ? 1.f : i == 3 ? 0.875f : 0.75f;
    for (std::size_t e = 0; e < after.size(); ++e)  // p - p / 4 and p - p / 8: one rounding
      CHECK(std::abs(after[e] - kept * before[i][e]) <= 0x1p-24f * std::abs(before[i][e]));
  }
  for (auto& [i, g] : gradients) std::fill(g.begin(), g.end(), 1.0f);
  optimizer.set_weight_decay(f.bag.parameters(), 0);  // from the next step on
  optimizer.set_lr_factor({f.bag.items[2]}, 0.5);
  optimizer.set_lr_factor({f.bag.items[4]}, 0);
  for (std::size_t i = 0; i < before.size(); ++i) before[i] = get(f.bag.items[i]);
  optimizer.zero_grad();
  give_gradients(f.bag, gradients);
  optimizer.step();
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Values after = get(f.bag.items[i]);
    for (std::size_t e = 0; e < after.size(); ++e)  // one rounding
      CHECK(after[e] == before[i][e] - (i == 2 ? 0.25f : i == 4 ? 0.f : 0.5f));
  }
}

TEST_CASE("weight decay is refused for what is not the optimizer's, and out of range", "[optim]") {
  Fixture f;
  f.bag.materialize(f.device);
  optim::AdamW optimizer({f.bag.items[1]});
  CHECK_THROWS_WITH(optimizer.set_weight_decay({f.bag.items[0]}, 0),
                    Catch::Contains("parameter '0' is not this optimizer's"));
  for (const double rate : {-0.5, double{INFINITY}, double{NAN}})
    CHECK_THROWS_WITH(optimizer.set_weight_decay({f.bag.items[1]}, rate),
                      Catch::Contains("weight_decay is"));
}

TEST_CASE("parameters that nobody has set aren't trained from the zeros of their memory",
          "[optim]") {
  const Device device = Device::cpu();
  Bag bag({{2, 2}, {3}});
  bag.nn::Module::materialize(device);
  optim::SGD optimizer(bag.parameters());
  const auto is_refused = [&](const char* name) {
    CHECK_THROWS_WITH(optimizer.step(), Catch::Contains(std::string("step: parameter '") + name) &&
                                            Catch::Contains("call nn::init, load or assign"));
  };
  is_refused("0");
  bag.items[0].assign(Tensor::zeros({2, 2}, f32, device));
  is_refused("1");
  bag.items[1].freeze();
  optimizer.step();
  bag.items[1].set_trainable(true);
  is_refused("1");
  bag.load({{"1", Tensor::zeros({3}, f32, device)}}, {.strict = false});
  optimizer.step();
}

TEST_CASE("two optimizers over one group clear the gradients of their own parameters", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  const auto gradients = f.gradients({0, 1, 2, 3, 4});
  give_gradients(f.bag, gradients);
  optim::SGD some({f.bag.items[0], f.bag.items[3]}), others({f.bag.items[1], f.bag.items[2]}),
      last({f.bag.items[4]});
  some.zero_grad();
  const FlatGroup& group = *state_of(f.bag.items[0])->group;
  REQUIRE(group.gradient.defined());
  const Values counts = group.counts().to_vector<float>();
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const bool is_cleared = i == 0 || i == 3;
    CHECK(f.bag.items[i].grad().to_vector<float>() ==
          (is_cleared ? Values(gradients.at(i).size(), 0.0f) : gradients.at(i)));
    CHECK(counts[i] == (is_cleared ? 0 : 1));
  }
  const Values before = get(f.bag.items[0]);
  some.step();  // has none
  CHECK(get(f.bag.items[0]) == before);
  others.zero_grad();
  CHECK(f.bag.items[4].grad().to_vector<float>() == gradients.at(4));
  last.zero_grad();
  for (const float x : f.bag.items[4].grad().to_vector<float>()) CHECK(x == 0);
  optim::SGD(f.bag.parameters()).zero_grad();
  CHECK_FALSE(group.gradient.defined());
}

TEST_CASE("optimizers refuse what makes no sense", "[optim]") {
  Bag bag(kShapes);
  const auto parameters = bag.parameters();
  CHECK_THROWS_AS(optim::AdamW({}), ContractError);
  CHECK_THROWS_AS(optim::AdamW(parameters, {.lr = -1}), ContractError);
  CHECK_THROWS_AS(optim::AdamW(parameters, {.beta2 = 1}), ContractError);
  CHECK_THROWS_AS(optim::AdamW(parameters, {.lr = NAN}), ContractError);
  CHECK_THROWS_AS(optim::AdamW(parameters, {.eps = INFINITY}), ContractError);
  CHECK_THROWS_AS(optim::SGD(parameters, {.momentum = 1}), ContractError);
  CHECK_THROWS_WITH(optim::SGD(parameters, {.momentum = 0.9, .dampening = 2}),
                    Contains("dampening is 2, expected 0 to 1"));
  CHECK_THROWS_WITH(optim::SGD(parameters, {.dampening = 0.5}), Contains("set momentum"));
  for (const double momentum : {0.0, 0.9})
    CHECK_THROWS_WITH(
        optim::SGD(parameters, {.momentum = momentum, .dampening = momentum, .nesterov = true}),
        Contains("it needs momentum above 0 and no dampening"));
  CHECK_THROWS_WITH(optim::SGD({Parameter()}), Contains("an undefined parameter"));
  CHECK_THROWS_WITH(optim::clip_grad_norm({Parameter()}, 1), Contains("an undefined parameter"));
  optim::AdamW optimizer(parameters);
  CHECK_THROWS_WITH(optimizer.prepare(), Contains("call materialize on the model"));
  bag.materialize(Device::cpu());
  optimizer.prepare();
  CHECK(optimizer.states().size() == 1);
}

TEST_CASE("a setter refuses what its constructor does, and names it", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  optim::AdamW adamw(f.bag.parameters(), {.lr = 0.5});
  optim::SGD sgd(f.bag.parameters(), {.lr = 0.5});
  for (optim::Optimizer* const optimizer :
       {static_cast<optim::Optimizer*>(&adamw), static_cast<optim::Optimizer*>(&sgd)}) {
    CHECK_THROWS_WITH(optimizer->set_lr(std::nan("")), Contains("Optimizer::set_lr: lr is nan"));
    CHECK_THROWS_WITH(optimizer->set_lr(-5), Contains("Optimizer::set_lr: lr is -5"));
    CHECK_THROWS_WITH(optimizer->set_lr(INFINITY), Contains("Optimizer::set_lr: lr is inf"));
    CHECK_THROWS_WITH(optimizer->set_steps(-1), Contains("Optimizer::set_steps: steps is -1"));
    CHECK_THROWS_AS(optimizer->set_steps((std::int64_t{1} << 53) + 1), ContractError);
    CHECK(optimizer->lr() == 0.5);
    optimizer->set_lr(0);
    CHECK(optimizer->lr() == 0);
  }
  CHECK_THROWS_AS(optim::SGD(f.bag.parameters(), {.lr = INFINITY}), ContractError);
  CHECK_THROWS_AS(optim::AdamW(f.bag.parameters(), {.weight_decay = INFINITY}), ContractError);
}

TEST_CASE("SGD keeps a momentum buffer under each name, if it has momentum", "[optim]") {
  Bag bag({{3, 2}, {3}});
  bag.materialize(Device::cpu());
  optim::SGD plain(bag.parameters()), heavy(bag.parameters(), {.momentum = 0.5});
  CHECK(plain.state_dict(bag).size() == 2 * 2 + 2);
  const StateDict state = heavy.state_dict(bag);
  CHECK(state.size() == 2 * 3 + 2);
  CHECK(state.at("0.momentum_buffer").values.shape() == Shape{3, 2});
}
