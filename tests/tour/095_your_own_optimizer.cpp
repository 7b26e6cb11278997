// Lesson 95: an optimizer of your own, with a fused update, from outside the library.
//
//   Lion   u = sign(beta1 m + (1 - beta1) g)
//          p = p (1 - lr decay) - lr u          m = beta2 m + (1 - beta2) g
//   Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023.
//
// All parameters of a unit lie in one flat array, and so do their gradients: one launch updates
// them all, whatever their number. You say two things, the base class does the rest.
//
//   write_scalars   the numbers of this step, put where the device reads them
//   update          one launch for one group; its body holds plain pointers
//
//   values     │ W ───────────│·│ b ───│·│ unused │·│      · padding, never touched
//   gradient   │              │ │      │ │        │ │
//   moment     │              │ │      │ │        │ │
//   segments   [begin, end)     ...      ...               with each parameter's rates
//   counts     1                1        0                 0: no rank had a gradient; skipped
//
// PyTorch: a subclass of torch.optim.Optimizer loops over the parameters in step(). foreach=True
// joins its small launches into fewer, fused=True exists for the optimizers that bring such a
// kernel, and state is a dictionary for each parameter.
//
// This body runs on the CPU. A GPU needs a kernel of yours, compiled by nvcc into your program; the
// body then launches it on the stream that it is given and passes `u` as it is, for all of its
// pointers are to device memory there:
//
//   lion_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(exec.native_stream)>>>(u);
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};

class Lion final : public ts::optim::Optimizer {
 public:
  explicit Lion(const std::vector<ts::Parameter>& parameters, const LionOptions& options)
      : Optimizer(parameters, options.lr, options.weight_decay,
                  {.moments = 1, .scalar_bytes = sizeof(Scalars)}),
        options_(options) {}

 private:
  struct Scalars {
    float lr, beta1, beta2;
  };
  void write_scalars(const ts::Tensor& scalars, std::int64_t) const override {
    put_scalars(scalars, Scalars{static_cast<float>(lr()), static_cast<float>(options_.beta1),
                                 static_cast<float>(options_.beta2)});
  }
  void update(const GroupState& state, const ts::Tensor& scalars) const override {
    launch("lion", state, scalars, [u = pointers(state, scalars)](ts::Exec& exec) {
      const Scalars s = *static_cast<const Scalars*>(u.scalars);
      u.for_ranges(exec, [&](const ts::optim::FlatRange& r) {
        const float lr = s.lr * r.lr_factor;
        float *p = r.values, *m = r.moments[0];
        for (std::int64_t i = 0; i < r.numel; ++i) {
          const float g = r.gradient[i], mixed = s.beta1 * m[i] + (1 - s.beta1) * g;
          const float sign = static_cast<float>((mixed > 0) - (mixed < 0));
          p[i] = p[i] * (1 - lr * r.weight_decay) - lr * sign;
          m[i] = s.beta2 * m[i] + (1 - s.beta2) * g;
        }
      });
    });
  }

  LionOptions options_;  // but lr, which changes
};

constexpr LionOptions kOptions{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
constexpr int kSteps = 20, kRows = 6, kColumns = 5;

class Project : public ts::nn::Module {
 public:
  Project() {
    register_parameter("W", W);
    register_parameter("unused", unused);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return ts::linear(x, W); });
  }
  ts::Parameter W{ts::Shape{kRows, kColumns}, ts::Initializer::normal(0, 1)};
  ts::Parameter unused{ts::Shape{3}, ts::Initializer::constant(2)};
};

// The gradient of W at `step`: the same for all rows, exact in f32 and on any number of ranks.
static float gradient(int step, int column) {
  return (static_cast<float>((step * 9 + column * 5) % 13 - 6) + 1.5f) / 4;
}

struct Trained {
  std::vector<float> before, after;  // all of W
  std::uint64_t launches_a_step = 0;
};

static Trained train(int ranks) {
  Trained all{std::vector<float>(kRows * kColumns), std::vector<float>(kRows * kColumns), 0};
  ts::run_local(ranks, {}, [&](ts::World& world) {
    Project project;
    ts::fully_shard(project, {.mesh = ts::DeviceMesh::flat(world)});
    project.materialize(world.device());
    ts::nn::init(project, {.value = 3});
    Lion lion(project.parameters(), kOptions);
    lion.prepare();
    const auto collect = [&](std::vector<float>& to) {  // each rank its rows
      const std::vector<float> rows = project.W.shard().to_vector<float>();
      const auto first = static_cast<std::ptrdiff_t>(project.W.spec().owned().begin);
      std::copy(rows.begin(), rows.end(), to.begin() + first * kColumns);
    };
    collect(all.before);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<float> x;
      for (int column = 0; column < kColumns; ++column) x.push_back(gradient(step, column));
      ts::sum(project(ts::Tensor::from(x, {1, kColumns}, world.device()))).backward();
      ts::optim::clip_grad_norm(project.parameters(), 1e6);  // larger than any: changes nothing
      const auto given = [&] { return world.device().compute().clock()[ts::StreamId::compute]; };
      const ts::Tick before = given();
      lion.step();
      if (world.rank() == 0) all.launches_a_step = given() - before;
      lion.zero_grad();
    }
    collect(all.after);
    for (const float value : project.unused.shard().to_vector<float>()) CHECK(value == 2);
  });
  return all;
}

int main() {
  const Trained one = train(1), two = train(2);
  std::cout << "1. " << kSteps << " steps, " << one.launches_a_step
            << " launches each: the scalars and one update for the unit\n";
  CHECK(one.launches_a_step == 2);

  // The same in double precision. A step rounds p, which stays below 4, three times, and lr, the
  // decay and their product once each. m is off by a rounding a step, at most 20 * 2^-24: less than
  // the smallest sum whose sign is taken, so that all signs are right.
  double worst = 0, smallest = 1;
  for (std::size_t i = 0; i < one.before.size(); ++i) {
    double p = one.before[i], m = 0;
    for (int step = 0; step < kSteps; ++step) {
      const double g = gradient(step, static_cast<int>(i) % kColumns);
      const double mixed = kOptions.beta1 * m + (1 - kOptions.beta1) * g;
      smallest = std::min(smallest, std::abs(mixed));
      p = p * (1 - kOptions.lr * kOptions.weight_decay) - kOptions.lr * ((mixed > 0) - (mixed < 0));
      m = kOptions.beta2 * m + (1 - kOptions.beta2) * g;
    }
    worst = std::max(worst, std::abs(p - static_cast<double>(one.after[i])));
  }
  std::cout << "2. From double precision it is off by " << worst << " after them\n";
  CHECK(smallest > 1e-3);
  CHECK(worst <= kSteps * (3 * 4 + 3) * 0x1p-24);

  CHECK(one.after == two.after);
  std::cout << "3. Two ranks, each with its rows: the same values\n";
}
