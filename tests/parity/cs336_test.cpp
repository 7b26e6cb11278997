// The checks of the FSDP part of Stanford's CS336 (spring 2026), assignment 2, restated over this
// engine; see tests/tour/cs336.md. Its toy model, sizes, optimizer and bounds are those of
// tests/test_fsdp.py in github.com/stanford-cs336/assignment2-systems, release 26.1.1: norms are
// whole on each rank, all other layers are units, and a rank has half of each batch.
//
// There the reference takes both halves as one batch. Here one rank takes them one after the other,
// so that it adds the same numbers in the same order, and f32 has to agree in every bit.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/autograd/losses.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/norm.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::int64_t kCs336Vocabulary = 100, kCs336Dim = 64, kCs336Hidden = 128, kCs336Length = 8;
constexpr int kCs336Batch = 20, kCs336Half = kCs336Batch / 2, kCs336Steps = 3;

class Cs336Model : public nn::Module {
 public:
  Cs336Model()
      : embedding(kCs336Vocabulary, kCs336Dim),
        norm1(kCs336Dim),
        linear1(kCs336Dim, kCs336Hidden, {.bias = false}),
        norm2(kCs336Hidden),
        linear2(kCs336Hidden, kCs336Dim, {.bias = false}),
        lm_head(kCs336Dim, kCs336Vocabulary, {.bias = false}) {
    register_modules("embedding", embedding, "norm1", norm1, "linear1", linear1, "norm2", norm2,
                     "linear2", linear2, "lm_head", lm_head);
  }
  // tokens [B, T] -> [B, T, kCs336Vocabulary].
  Tensor operator()(const Tensor& tokens) {
    return call([&] { return lm_head(linear2(norm2(relu(linear1(norm1(embedding(tokens))))))); });
  }
  std::vector<Parameter> whole() { return {norm1.weight, norm2.weight}; }

  nn::Embedding embedding;
  nn::RMSNorm norm1;
  nn::Linear linear1;
  nn::RMSNorm norm2;
  nn::Linear linear2, lm_head;
};

void shard_and_init(Cs336Model& model, const World& world, const MixedPrecision& precision,
                    std::uint64_t seed) {
  const ShardOptions options{
      .mesh = DeviceMesh::flat(world), .precision = precision, .ignored = model.whole()};
  for (nn::Module* layer : std::vector<nn::Module*>{&model.embedding, &model.linear1,
                                                    &model.linear2, &model.lm_head, &model})
    fully_shard(*layer, options);
  nn::init(model, {seed}, world.device());
}

// Samples of all ranks, in an order that changes from step to step.
class Cs336Samples {
 public:
  explicit Cs336Samples(std::uint64_t seed) : draw_(seed), order_(kCs336Batch) {
    std::iota(order_.begin(), order_.end(), 0);
    for (std::int64_t i = 0; i < kCs336Batch * (kCs336Length + 1); ++i)
      tokens_.push_back(static_cast<std::int32_t>(draw_() % kCs336Vocabulary));
  }
  void shuffle() { std::shuffle(order_.begin(), order_.end(), draw_); }
  // The loss of half `half` of the batch: of what follows each sample's last token.
  Tensor loss(Cs336Model& model, int half, const Device& device) const {
    std::vector<std::int32_t> tokens, labels;
    for (int i = half * kCs336Half; i < (half + 1) * kCs336Half; ++i) {
      const auto sample =
          tokens_.begin() + order_[static_cast<std::size_t>(i)] * (kCs336Length + 1);
      tokens.insert(tokens.end(), sample, sample + kCs336Length);
      labels.push_back(sample[kCs336Length]);
    }
    const Tensor logits = model(Tensor::from(tokens, {kCs336Half, kCs336Length}, device));
    return cross_entropy(select(logits, 1, kCs336Length - 1),
                         Tensor::from(labels, {kCs336Half}, device));
  }

 private:
  std::mt19937_64 draw_;
  std::vector<std::int32_t> tokens_;  // of each sample kCs336Length, and its label
  std::vector<int> order_;
};

using Cs336Values = std::map<std::string, std::vector<float>>;
Cs336Values full_of(nn::Module& model) {
  Cs336Values values;
  for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
    values[name] = full.to_vector<float>();
  });
  return values;
}

// The parameters after each step.
std::vector<Cs336Values> train_on_two(const MixedPrecision& precision, std::uint64_t seed) {
  std::vector<Cs336Values> steps;
  run_checked(2, {.threads = 1}, [&](World& world) {
    Cs336Model model;
    shard_and_init(model, world, precision, seed);
    optim::SGD optimizer(model.parameters(), {.lr = 0.01});
    Cs336Samples samples(seed);
    for (int step = 0; step < kCs336Steps; ++step, samples.shuffle()) {
      optimizer.zero_grad();
      samples.loss(model, world.rank(), world.device()).backward();
      for (const Parameter& p : model.whole())
        raw::copy_into(p.grad(), raw::mul(dist::all_reduce(p.grad(), world), 0.5));
      optimizer.step();
      Cs336Values values = full_of(model);
      if (world.rank() == 0) steps.push_back(std::move(values));
    }
  });
  return steps;
}

std::vector<Cs336Values> train_on_one(const MixedPrecision& precision, std::uint64_t seed) {
  std::vector<Cs336Values> steps;
  const World world = World::single({.threads = 1});
  Cs336Model model;
  shard_and_init(model, world, precision, seed);
  optim::SGD optimizer(model.parameters(), {.lr = 0.01});
  Cs336Samples samples(seed);
  for (int step = 0; step < kCs336Steps; ++step, samples.shuffle()) {
    std::vector<Tensor> first;
    for (const int half : {0, 1}) {
      optimizer.zero_grad();
      samples.loss(model, half, world.device()).backward();
      for (const Parameter& p : model.parameters())
        if (half == 0) first.push_back(raw::mul(p.grad(), 1));
    }
    const std::vector<Parameter> parameters = model.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      raw::copy_into(parameters[i].grad(), raw::mul(raw::add(first[i], parameters[i].grad()), 0.5));
    optimizer.step();
    steps.push_back(full_of(model));
  }
  return steps;
}

}  // namespace

TEST_CASE("CS336: two ranks train as one that takes their batches one after the other",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<Cs336Values> two = train_on_two({}, seed), one = train_on_one({}, seed);
  REQUIRE(two.size() == kCs336Steps);
  for (int step = 0; step < kCs336Steps; ++step)
    for (const auto& [name, values] : one[static_cast<std::size_t>(step)]) {
      INFO("step " << step << ", " << name);
      CHECK(two[static_cast<std::size_t>(step)].at(name) == values);
    }
  CHECK(one[0] != one[1]);  // it trains
}

TEST_CASE("CS336: in 16 bits, too, but for what their sums round", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const MixedPrecision precision{.param = f16, .reduce = f32, .output = f32};
  const std::vector<Cs336Values> two = train_on_two(precision, seed),
                                 one = train_on_one(precision, seed);
  for (int step = 0; step < kCs336Steps; ++step)
    for (const auto& [name, values] : one[static_cast<std::size_t>(step)]) {
      INFO("step " << step << ", " << name);
      const std::vector<float>& mine = two[static_cast<std::size_t>(step)].at(name);
      REQUIRE(mine.size() == values.size());
      // The assignment's own bound, absolute and relative. Its reference and its student round to
      // 16 bits at the same places, as ours do.
      for (std::size_t i = 0; i < values.size(); ++i)
        CHECK(std::abs(mine[i] - values[i]) <= 1e-4f + 1e-4f * std::abs(values[i]));
    }
}

TEST_CASE("CS336: gradients have their shards' shapes in f32, those of whole norms one value",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const MixedPrecision& precision :
       {MixedPrecision{}, MixedPrecision{.param = f16, .reduce = f32, .output = f32}}) {
    std::vector<std::vector<std::vector<float>>> norms(2);
    run_checked(2, {.threads = 1}, [&](World& world) {
      Cs336Model model;
      shard_and_init(model, world, precision, seed);
      Cs336Samples(seed).loss(model, world.rank(), world.device()).backward();
      for (const Parameter& p : model.whole()) {
        raw::copy_into(p.grad(), raw::mul(dist::all_reduce(p.grad(), world), 0.5));
        norms[static_cast<std::size_t>(world.rank())].push_back(p.grad().to_vector<float>());
      }
      for (const Parameter& p : model.parameters()) {
        if (!p.grad().defined()) throw std::runtime_error("no gradient of " + p.name());
        if (p.grad().shape() != p.shard().shape() || p.grad().dtype() != f32)
          throw std::runtime_error("another gradient than the shard of " + p.name());
      }
    });
    CHECK(norms[0].size() == 2);
    CHECK(norms[0] == norms[1]);
    CHECK(norms[0][0] != std::vector<float>(kCs336Dim, 0));
  }
}
