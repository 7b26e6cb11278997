// Lesson 96: an exponential moving average of the weights, and a model's state by name.
//
//   Training jumps around a minimum as far as its rate and the noise of batches throw it. The mean
//   of its last weights lies nearer, so it is evaluated, sampled and kept in their place:
//
//   rank 0   shards of W ──▶ step ──▶ step ──▶ step      average = decay average + (1 - decay) W,
//            shards of A ─────┴────────┴────────┘        on the same rows: nothing is sent
//   rank 1   the same with its own rows
//
// state_dict() copies this rank's rows under their names, load() puts such rows back, and between
// the two an average is a loop over names. A state dict of whole tensors, or a file, is loaded by
// the same call, on any number of ranks.
//
// PyTorch: torch.optim.swa_utils.AveragedModel deep-copies the module and averages through
// multi_avg_fn; under FSDP2 the copy's parameters are DTensors, so it averages shards too. There a
// state dict shares memory with the model, so that whoever keeps the best weights has to clone it.
//
// Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
#include <cmath>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

class Average {
 public:
  Average(ts::nn::Module& model, double decay)
      : model_(model), decay_(decay), state_(model.state_dict()) {}

  // After each step.
  void update() {
    for (const auto& [name, p] : model_.named_parameters())
      ts::raw::axpby(state_.at(name).values, p.shard(), 1 - decay_, decay_);
  }
  // f() with the average in the place of the weights, which come back whatever f does.
  template <class F>
  auto during(const F& f) {
    struct Back {
      ts::nn::Module& model;
      ts::StateDict state = model.state_dict();
      ~Back() { model.load(state); }
    } back{model_};
    model_.load(state_);
    return f();
  }
  std::vector<float> rows(std::string_view name) const {
    return state_.find(name)->second.values.to_vector<float>();
  }

 private:
  ts::nn::Module& model_;
  double decay_;
  ts::StateDict state_;
};

constexpr double kDecay = 0.9;
constexpr int kSteps = 200, kIn = 6, kOut = 5, kBatch = 16;

struct Trained {
  std::vector<float> weights, average;  // this rank's rows
  std::vector<double> reference;        // of the average: the same in double precision
  double loss = 0, averaged_loss = 0, loss_again = 0;
  std::int64_t collectives = 0;  // of all updates of the average
};

static Trained train(ts::World& world) {
  const ts::Device& device = world.device();
  ts::nn::Linear model(kIn, kOut, {.bias = false});
  ts::fully_shard(model, {.mesh = ts::DeviceMesh::flat(world)});
  model.materialize(device);
  ts::nn::init(model, {.value = 3});
  Average average(model, kDecay);
  ts::optim::SGD optimizer(model.parameters(), {.lr = 0.8});

  const auto drawn = [&](int rows, int columns, std::uint64_t key) {
    return ts::Tensor::normal({rows, columns}, 0, 1, key, ts::f32, device);
  };
  const ts::Tensor truth = drawn(kOut, kIn, 1);
  const auto loss_of = [&](int batch, double noise) {
    const ts::Tensor x = drawn(kBatch, kIn, 100 + static_cast<std::uint64_t>(batch));
    const ts::Tensor labels = ts::linear(x, truth) + drawn(kBatch, kOut, 999 - batch) * noise;
    const ts::Tensor error = model(x) - labels;
    return ts::mean(error * error);
  };
  Trained t;
  for (const float w : model.weight.shard().to_vector<float>()) t.reference.push_back(w);
  for (int step = 0; step < kSteps; ++step) {
    loss_of(step, 1).backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto before = ts::shard_counters(model);
    average.update();
    const auto after = ts::shard_counters(model);
    t.collectives += static_cast<std::int64_t>(after.gathers - before.gathers) +
                     static_cast<std::int64_t>(after.reductions - before.reductions);
    const std::vector<float> rows = model.weight.shard().to_vector<float>();
    for (std::size_t i = 0; i < rows.size(); ++i)
      t.reference[i] = kDecay * t.reference[i] + (1 - kDecay) * static_cast<double>(rows[i]);
  }
  model.eval();
  const auto evaluate = [&] { return loss_of(-1, 0).item(); };
  t.loss = evaluate();
  t.averaged_loss = average.during(evaluate);
  t.loss_again = evaluate();
  t.weights = model.weight.shard().to_vector<float>();
  t.average = average.rows("weight");
  return t;
}

int main() {
  std::vector<Trained> two(2);
  Trained one;
  ts::run_local(1, {}, [&](ts::World& world) { one = train(world); });
  ts::run_local(
      2, {}, [&](ts::World& world) { two[static_cast<std::size_t>(world.rank())] = train(world); });
  std::cout << "1. " << kSteps << " steps on noisy labels. Error on clean ones: " << one.loss
            << " of the last weights, " << one.averaged_loss << " of their average\n";
  CHECK(one.averaged_loss < 0.5 * one.loss);
  CHECK(one.loss_again == one.loss);  // the weights came back

  std::vector<float> joined = two[0].average;
  joined.insert(joined.end(), two[1].average.begin(), two[1].average.end());
  std::cout << "2. Two ranks average " << two[0].average.size() << " and " << two[1].average.size()
            << " values of " << one.average.size() << ", each its own rows, by "
            << two[0].collectives << " collectives\n";
  CHECK(two[0].average.size() == 3 * kIn && two[1].average.size() == 2 * kIn);
  CHECK(two[0].collectives == 0);
  CHECK(joined == one.average);

  // An update rounds twice, by 2^-24 of a value below 8; the decay leaves at most ten updates'.
  double worst = 0;
  for (std::size_t i = 0; i < one.average.size(); ++i)
    worst = std::max(worst, std::abs(one.reference[i] - static_cast<double>(one.average[i])));
  std::cout << "3. From double precision the average is off by " << worst << '\n';
  CHECK(worst < 10 * 2 * 8 * 0x1p-24);
}
