// Clip::in_optimizer on one rank: whatever a program does in between, it sees what a pass over the
// gradients gives. Over ranks: tests/shard/optim_clip_test.
#include <algorithm>
#include <bit>
#include <cmath>

#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/optim/clipped.hpp"
#include "tests/support/launches.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Descent as a program writes it, which knows nothing of clipping.
class Outside final : public optim::Optimizer {
 public:
  explicit Outside(const std::vector<Parameter>& parameters)
      : Optimizer(parameters, 0.5, 0, {.moments = 0}) {}

 private:
  void write_scalars(const Tensor& scalars, std::int64_t) const override {
    kernels::UpdateScalars s{};
    s.lr = static_cast<float>(lr());
    put_scalars(scalars, s);
  }
  void update(const GroupState& state, const Tensor& scalars) const override {
    launch("outside", state, scalars, [u = pointers(state, scalars)](Exec& exec) {
      const float lr = static_cast<const kernels::UpdateScalars*>(u.scalars)->lr;
      u.for_ranges(exec, [lr](const optim::FlatRange& r) {
        for (std::int64_t i = 0; i < r.numel; ++i) r.values[i] -= lr * r.gradient[i];
      });
    });
  }
};

// One clipped training, and all that a program can see of it.
struct ClippedRun {
  Draw draw;
  Device device = Device::cpu();
  Bag bag{kClippedShapes};
  optim::Clip how;
  Values seen{};

  ClippedRun(std::uint64_t seed, optim::Clip clip) : draw{.seed = seed}, how(clip) {
    bag.materialize(device);
    for (const Parameter& p : bag.items) set(p, draw.values(p.shape().numel(), 0.1f, 2));
  }
  void backward() { give_gradients(bag, random_gradients(draw, 0.1f, 3)); }
  void clip(const std::vector<Parameter>& of, double most) {
    seen.push_back(
        static_cast<float>(optim::clip_grad_norm(of, most, optim::NormType::l2, how).item()));
  }
  void clip(double most = 1) { clip(bag.parameters(), most); }
  void see(const Tensor& t) {
    if (!t.defined()) return;
    const Values values = t.to_vector<float>();
    seen.insert(seen.end(), values.begin(), values.end());
  }
  void see_all(const optim::Optimizer& optimizer) {
    for (const Parameter& p : optimizer.parameters()) {
      see(p.shard());
      for (const Tensor& moment : optimizer.moments(p)) see(moment);
    }
  }
  void step(optim::Optimizer& optimizer) {
    backward();
    clip();
    optimizer.step();
    optimizer.zero_grad();
    see_all(optimizer);
  }
};

}  // namespace

TEST_CASE("a coefficient that the optimizer applies gives the bits of a pass over the gradients",
          "[optim]") {
  using Run = ClippedRun;
  struct Scenario {
    const char* name;
    int passes;  // that are left of those in place
    void (*run)(Run&);
  };
  const Scenario scenarios[] = {
      {"AdamW", 0,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters(), {.lr = 0.1});
         for (int k = 0; k < 3; ++k) r.step(adamw);
       }},
      {"an optimizer from outside", 2,
       [](Run& r) {
         Outside outside(r.bag.parameters());
         for (int k = 0; k < 2; ++k) r.step(outside);
       }},
      {"a program that reads the gradients", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip();
         for (const Parameter& p : r.bag.items) r.see(p.grad());
         adamw.step();
         r.see_all(adamw);
       }},
      {"one that clips twice", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip(2);
         r.clip(0.5);
         adamw.step();
         r.see_all(adamw);
       }},
      {"the norm of what is clipped", 1,
       [](Run& r) {
         r.backward();
         r.clip(2);
         r.clip(0);
       }},
      {"optimizers of some of the parameters each", 1,
       [](Run& r) {
         optim::AdamW some({r.bag.items[0], r.bag.items[2]});
         optim::AdamW other({r.bag.items[1]});
         r.backward();
         r.clip();
         some.step();
         some.zero_grad();  // what is left of the gradient is multiplied
         other.step();
         r.see(r.bag.items[1].grad());
         other.zero_grad();
         r.see_all(some);
         r.see_all(other);
       }},
      {"two steps of one gradient", 0,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip();
         adamw.step();
         adamw.step();
         r.see_all(adamw);
       }},
      {"no step, but another backward", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip();
         r.backward();
         r.see(r.bag.items[0].grad());
         r.clip();
         adamw.step();
         r.see_all(adamw);
       }},
      {"gradients that are dropped", 0,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip(0.01);
         adamw.zero_grad();
         r.backward();
         adamw.step();
         r.see_all(adamw);
       }},
      {"a scaler that unscales before", 0,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         optim::GradScaler scaler(r.device, {.init_scale = 8});
         r.backward();
         scaler.unscale(adamw);
         r.clip();
         scaler.step(adamw);
         scaler.update();
         r.see_all(adamw);
       }},
      {"a scaler that unscales after", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         optim::GradScaler scaler(r.device, {.init_scale = 8});
         r.backward();
         r.clip();
         scaler.step(adamw);
         r.see(r.bag.items[0].grad());
         scaler.update();
         r.see_all(adamw);
       }},
      {"a parameter that is frozen behind clipping", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip();
         r.bag.items[1].freeze();
         adamw.step();
         r.see_all(adamw);
       }},
      {"a state dict that another optimizer takes over", 0,
       [](Run& r) {
         optim::AdamW first(r.bag.parameters()), second(r.bag.parameters());
         r.step(first);
         r.backward();
         r.clip();
         second.load(r.bag, first.state_dict(r.bag));
         second.step();
         r.see_all(second);
       }},
      {"some parameters of the group", 1,
       [](Run& r) {
         optim::AdamW adamw(r.bag.parameters());
         r.backward();
         r.clip({r.bag.items[1], r.bag.items[2]}, 1);
         adamw.step();
         r.see_all(adamw);
       }},
      {"a norm that is no number, and a gradient dropped in part", 1,
       [](Run& r) {
         optim::AdamW some({r.bag.items[0]}), others({r.bag.items[1], r.bag.items[2]});
         auto gradients = random_gradients(r.draw, 0.1f, 3);
         gradients[2][0] = INFINITY;
         give_gradients(r.bag, gradients);
         r.clip();  // infinite: a coefficient of 0, and inf times it
         some.zero_grad();
         r.see(r.bag.items[0].grad());
         others.step();
         for (const float x : get(r.bag.items[2])) r.seen.push_back(std::isnan(x) ? -7 : x);
       }},
  };
  const std::uint64_t seed = fresh_seed();
  for (const Scenario& scenario : scenarios) {
    INFO(scenario.name << ", seed " << seed);
    const auto passes_of = [&](Run& run) {
      const Launches launches(run.device);
      scenario.run(run);
      return static_cast<int>(launches.of("scale_gradient"));
    };
    Run in_place(seed, optim::Clip::in_place), in_optimizer(seed, optim::Clip::in_optimizer);
    const int passes = passes_of(in_place);
    CHECK(passes > 0);
    CHECK(passes_of(in_optimizer) == scenario.passes);
    REQUIRE(in_place.seen.size() > 1);
    CHECK(std::equal(in_place.seen.begin(), in_place.seen.end(), in_optimizer.seen.begin(),
                     in_optimizer.seen.end(), [](float a, float b) {
                       return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
                     }));
  }
}

TEST_CASE("gradients that are waiting for the optimizer are not yet those of the tensor before",
          "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  Bag bag(kClippedShapes);
  bag.materialize(Device::cpu());
  give_gradients(bag, random_gradients(draw, 0.1f, 3));
  const Tensor before = bag.items[0].grad();
  const Values unscaled = before.to_vector<float>();
  optim::clip_grad_norm(bag.parameters(), 0.5, optim::NormType::l2, optim::Clip::in_optimizer);
  CHECK(before.to_vector<float>() == unscaled);
  CHECK(bag.items[0].grad().to_vector<float>() != unscaled);
  CHECK(before.to_vector<float>() != unscaled);  // it is one memory
}
