// Lesson 88: a mixture of experts.
//
// A router sends each token to its top two of four small networks, and adds up what they return:
//
//   x [T, D] ── router ─► softmax, top 2 ─► expert and gate of each token and choice
//       │                                      │
//       └─ dispatch ─► inbox [E C, D] ─► expert e: its C rows ─► outbox ─ combine ─► y [T, D]
//
// How many tokens an expert gets is known on the device alone, and nobody asks it: each expert has
// room for C tokens, a token takes the next free row, and one that finds none is dropped, its share
// of y is 0. So shapes never depend on values, every rank makes the same calls, and a plan of
// memory holds.
//
// There are two ways to share the work. Sharded, each expert is a unit: its weights come to the
// tokens, for as long as it runs. With expert parallelism a rank keeps whole experts, and the
// tokens go to them: an all-to-all there, another one back, and in backward the same.
// Source: Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic
// sharding", 2021.
//
// PyTorch: torchtitan's MoE sorts tokens by expert and reads the counts on the host, so that its
// all_to_all_single can be uneven and no token is dropped; FSDP2 shards its experts along
// dimension 0 of one stacked parameter.
#include <cmath>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::Tensor;

constexpr std::int64_t kDim = 8, kExperts = 4, kChoices = 2;

// Part r of x [ranks, ...] goes to rank r, which gets part r of the result from it. Runs on the
// compute stream, so it waits for what made x, and what reads its result waits for it.
static Tensor exchange(const ts::World& world, const Tensor& x) {
  const auto move = [&world](const Tensor& given) {
    const Tensor in = ts::raw::contiguous(given);
    Tensor out = Tensor::empty(in.shape(), in.dtype(), in.device());
    const ts::Access touched[] = {in.access(ts::AccessMode::read),
                                  out.access(ts::AccessMode::write)};
    world.control().submit({.send = in.data(),
                            .recv = out.data(),
                            .count = in.numel() / world.size(),
                            .kind = ts::CollectiveKind::all_to_all},
                           "exchange", touched);
    return out;
  };
  return ts::autograd::record(
      "exchange", {x}, move(x),
      [move](const Tensor& g, ts::autograd::Gradients& out) { out.set(0, move(g)); });
}

class Mixture : public ts::nn::Module {
 public:
  // `capacity`: rows of each expert. With `world`, this rank runs its share of the experts alone.
  explicit Mixture(std::int64_t capacity, const ts::World* world = nullptr)
      : router(kDim, kExperts, {.bias = false}), capacity_(capacity), world_(world) {
    register_module("router", router);
    for (int e = 0; e < kExperts; ++e) experts.emplace_back(kDim, 2 * kDim);
    register_module("experts", experts);
  }

  Tensor operator()(const Tensor& x) {
    return call(
        [&](const Tensor& in) {
          const Tensor gates = softmax(router(in));
          const std::vector<Choice> choices = choose(gates.detach());
          const std::int64_t rows = kExperts * capacity_;
          Tensor inbox = Tensor::zeros({rows + 1, kDim}, in.dtype(), in.device());
          for (const Choice& c : choices)
            inbox = scatter_add(inbox, 0, ts::raw::expand(c.row, in.shape()), in);
          const Tensor outbox[] = {run(slice(inbox, 0, 0, rows)),
                                   Tensor::zeros({1, kDim}, in.dtype(), in.device())};
          const Tensor all = cat(outbox, 0);
          Tensor y, total;
          for (const Choice& c : choices) {
            const Tensor gate = gather(gates, 1, c.expert);
            const Tensor part = index_select(all, 0, reshape(c.row, {in.size(0)})) * gate;
            y = y.defined() ? y + part : part;
            total = total.defined() ? total + gate : gate;
          }
          return y / total;
        },
        x);
  }

  ts::nn::Linear router;
  ts::nn::ModuleList<ts::nn::SwigluMlp> experts;
  Tensor dropped;  // of the last call: how many tokens and choices found no row

 private:
  struct Choice {
    Tensor expert, row;  // i64 [T, 1]; the row behind the last takes what is dropped
  };

  // Top-k without sorting: the largest, then the largest of the rest. A token's row is the number
  // of those before it that chose its expert: a product with a triangle of ones.
  std::vector<Choice> choose(Tensor left) {
    const std::int64_t tokens = left.size(0);
    const ts::Device device = left.device();
    const Tensor order = Tensor::arange(tokens, ts::f32, device);
    const Tensor before = cast(reshape(order, {tokens, 1}) > order, ts::f32);  // [T, T]
    const auto number = [&](double value) { return Tensor::full({}, value, ts::f32, device); };
    Tensor taken = Tensor::zeros({kExperts}, ts::f32, device);
    dropped = number(0);
    std::vector<Choice> choices;
    for (int k = 0; k < kChoices; ++k) {
      const Tensor expert = reshape(argmax(left, 1), {tokens, 1});
      const Tensor is_it = Tensor::arange(kExperts, ts::i64, device) == expert;  // [T, E]
      left = where(is_it, number(-1), left);
      const Tensor chosen = cast(is_it, ts::f32);
      const Tensor place = sum((matmul(before, chosen) + taken) * chosen, 1, ts::raw::KeepDim::yes);
      taken = taken + sum(chosen, 0);
      const Tensor fits = place < number(static_cast<double>(capacity_));
      const Tensor row = cast(expert, ts::f32) * static_cast<double>(capacity_) + place;
      const Tensor last = number(static_cast<double>(kExperts * capacity_));
      choices.push_back({expert, cast(where(fits, row, last), ts::i64)});
      dropped = dropped + sum(cast(ts::raw::logical_not(fits), ts::f32));
    }
    return choices;
  }

  // The experts' outputs [E C, D] for their inputs.
  Tensor run(const Tensor& inbox) {
    std::vector<Tensor> outputs;
    if (!world_) {
      for (std::int64_t e = 0; e < kExperts; ++e)
        outputs.push_back(experts[e](slice(inbox, 0, e * capacity_, (e + 1) * capacity_)));
      return cat(outputs, 0);
    }
    const std::int64_t ranks = world_->size(), mine = kExperts / ranks;
    const Tensor here = exchange(*world_, reshape(inbox, {ranks, mine, capacity_, kDim}));
    for (std::int64_t e = 0; e < mine; ++e) {
      const Tensor rows = reshape(slice(here, 1, e, e + 1), {ranks * capacity_, kDim});
      const Tensor out = experts[world_->rank() * mine + e](rows);
      outputs.push_back(reshape(out, {ranks, 1, capacity_, kDim}));
    }
    return reshape(exchange(*world_, cat(outputs, 1)), {kExperts * capacity_, kDim});
  }

  std::int64_t capacity_;
  const ts::World* world_;
};

// Losses of 60 steps on 32 tokens, whose target is |x|: each rank has its share of them.
static std::vector<double> train(int ranks) {
  std::vector<double> losses;
  ts::run_local(ranks, {}, [&](ts::World& world) {
    Mixture model(64);
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    for (auto& expert : model.experts) ts::fully_shard(expert, options);
    ts::fully_shard(model, options);  // the router
    model.materialize(world.device());
    ts::nn::init(model, {.value = 7});
    ts::optim::AdamW optimizer(model.parameters(), {.lr = 1e-2, .weight_decay = 0});
    const std::int64_t share = 32 / world.size(), first = world.rank() * share;
    const Tensor all = Tensor::normal({32, kDim}, 0, 1, 3, ts::f32, world.device());
    const Tensor x = ts::raw::slice(all, 0, first, first + share), target = ts::raw::abs(x);
    for (int step = 0; step < 60; ++step) {
      const Tensor loss = mse_loss(model(x), target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      CHECK(model.dropped.item() == 0);
      const double mean = world.sum(loss.item()) / world.size();
      if (world.rank() == 0) losses.push_back(mean);
    }
  });
  return losses;
}

int main() {
  const std::vector<double> one = train(1), two = train(2);
  std::cout << "1. Sharded experts: loss " << one.front() << ", after 60 steps " << one.back()
            << " on one rank, " << two.back() << " on two\n";
  CHECK(one.back() < 0.5 * one.front());
  // The ranks' sums round in another order, a few f32 rounding errors (6e-8) a step.
  for (int step = 0; step < 10; ++step) CHECK(std::abs(one[step] - two[step]) < 1e-4 * one[step]);

  ts::run_local(2, {}, [](ts::World& world) {
    const auto key = static_cast<std::uint64_t>(world.rank());  // tokens of its own
    const Tensor x = Tensor::normal({16, kDim}, 0, 1, key, ts::f32, world.device());
    const auto results = [&](Mixture& model) {
      model.materialize(world.device());
      ts::nn::init(model, {.value = 7});
      Tensor in = x.detach().require_grad();
      const Tensor y = model(in);
      sum(y * y).backward();
      return std::pair(y.to_vector<float>(), in.grad().to_vector<float>());
    };
    Mixture here(16), apart(16, &world), small(4);
    CHECK(results(here) == results(apart));
    results(small);
    const double dropped = small.dropped.item();
    CHECK(dropped > 0 && here.dropped.item() == 0);
    if (world.rank() == 0)
      std::cout << "2. Tokens that travel to their experts: the same bits, of y and of dx\n"
                << "3. Room for 4 tokens an expert drops " << dropped << " of 32 choices\n";
  });
}
