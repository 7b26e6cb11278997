// Lesson 88: a mixture of experts.
//
// A router sends each token to its top two of four small networks, and adds up what they return:
//
//   x [T, D] ── router ─► softmax, top 2 ─► expert and gate of each token and choice
//       │                                      │
//       └─ dispatch ─► inbox [E C, D] ─► expert e: its C rows ─► outbox ─ combine ─► y [T, D]
//
// How many tokens an expert gets is known on the device alone. Nobody asks: each expert has room
// for C tokens, a token takes the next free row, and where none is left its share of y is 0. So
// shapes never depend on values, every rank makes the same calls, and a plan of memory holds.
//
// Sharded, each expert is a unit: its weights come to the tokens. With expert parallelism (ep) a
// rank runs experts of its own, and the tokens go to them: an all-to-all there, and one back.
// Within data parallelism (dp) both are true, along two dimensions of a mesh:
//
//     experts 0, 1   rank 0 ◄─ ep: tokens ─► rank 1   experts 2, 3
//     in halves      rank 2 ◄─ ep: tokens ─► rank 3   in halves, which meet along dp
//
// Source: Lepikhin et al., "GShard: scaling giant models with conditional computation", 2021.
//
// PyTorch: torchtitan's MoE reads the counts on the host, so that its all_to_all_single can be
// uneven and no token is dropped; FSDP2 shards its experts as one stacked parameter.
#include <iostream>
#include <utility>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::Tensor;

constexpr std::int64_t kDim = 8, kExperts = 4, kChoices = 2;

// Part r of x [ranks, ...], or of gradients, goes to rank r, which sends part r of the result.
static Tensor exchange(const ts::RankGroup& group, const Tensor& x) {
  const auto move = [&group](const Tensor& given) { return ts::dist::all_to_all(given, group); };
  return ts::autograd::record("exchange", {x}, move(x.detach()),
                              [move](const Tensor& g, auto& out) { out.set(0, move(g)); });
}

class Mixture : public ts::nn::Module {
 public:
  // `capacity`: rows of each expert. With `ep`, this rank runs its share of the experts alone.
  explicit Mixture(std::int64_t capacity, const ts::RankGroup* ep = nullptr)
      : router(kDim, kExperts, {.bias = false}), capacity_(capacity), ep_(ep) {
    register_module("router", router);
    for (int e = 0; e < kExperts; ++e) experts.emplace_back(kDim, 2 * kDim);
    register_module("experts", experts);
  }
  Tensor operator()(const Tensor& x) {
    return call([&](const Tensor& in) { return mix(in); }, x);
  }

  ts::nn::Linear router;
  ts::nn::ModuleList<ts::nn::SwigluMlp> experts;
  Tensor dropped;  // of the last call: how many choices found no row

 private:
  struct Choice {
    Tensor expert, row;  // i64 [T, 1]; the row behind the last takes what is dropped
  };

  Tensor mix(const Tensor& x) {
    const auto zeros = [&](std::int64_t rows, std::int64_t columns) {
      return Tensor::zeros({rows, columns}, x.dtype(), x.device());
    };
    const std::int64_t tokens = x.size(0), rows = kExperts * capacity_;
    const Tensor gates = softmax(router(x));
    const std::vector<Choice> choices = choose(gates.detach());
    Tensor inbox = zeros(rows + 1, kDim), y = zeros(tokens, kDim), total = zeros(tokens, 1);
    for (const Choice& c : choices)
      inbox = scatter_add(inbox, 0, ts::raw::expand(c.row, x.shape()), x);
    const Tensor outbox[] = {run(slice(inbox, 0, 0, rows)), zeros(1, kDim)};
    for (const Choice& c : choices) {
      const Tensor gate = gather(gates, 1, c.expert);
      y = y + index_select(cat(outbox, 0), 0, reshape(c.row, {tokens})) * gate;
      total = total + gate;
    }
    return y / total;
  }

  // The largest gate, then the largest of the rest. A token's row is the number of those before it
  // that chose its expert: a product with a triangle of ones.
  std::vector<Choice> choose(Tensor left) {
    const std::int64_t tokens = left.size(0);
    const auto number = [&](double v) { return Tensor::full({}, v, ts::f32, left.device()); };
    const Tensor order = Tensor::arange(tokens, ts::f32, left.device());
    const Tensor before = cast(reshape(order, {tokens, 1}) > order, ts::f32);  // [T, T]
    const auto room = static_cast<double>(capacity_);
    Tensor taken = Tensor::zeros({kExperts}, ts::f32, left.device());
    dropped = number(0);
    std::vector<Choice> choices;
    for (int k = 0; k < kChoices; ++k) {
      const Tensor expert = reshape(argmax(left, 1), {tokens, 1});
      const Tensor is_it = Tensor::arange(kExperts, ts::i64, left.device()) == expert;  // [T, E]
      const Tensor chosen = cast(is_it, ts::f32);
      const Tensor position =
          sum((matmul(before, chosen) + taken) * chosen, 1, ts::raw::KeepDim::yes);
      const Tensor fits = position < number(room), row = cast(expert, ts::f32) * room + position;
      choices.push_back({expert, cast(where(fits, row, number(kExperts * room)), ts::i64)});
      dropped = dropped + sum(cast(ts::raw::logical_not(fits), ts::f32));
      taken = taken + sum(chosen, 0);
      left = where(is_it, number(-1), left);
    }
    return choices;
  }

  // The experts' outputs [E C, D] for their inputs.
  Tensor run(const Tensor& inbox) {
    const std::int64_t ranks = ep_ ? ep_->size() : 1, mine = kExperts / ranks;
    const auto travel = [&](const Tensor& x) { return ep_ ? exchange(*ep_, x) : x; };
    const Tensor here = travel(reshape(inbox, {ranks, mine, capacity_, kDim}));
    std::vector<Tensor> outputs;
    for (std::int64_t e = 0; e < mine; ++e) {
      auto& expert = experts[static_cast<std::size_t>(e + (ep_ ? ep_->rank() * mine : 0))];
      const Tensor rows = reshape(slice(here, 1, e, e + 1), {ranks * capacity_, kDim});
      outputs.push_back(reshape(expert(rows), {ranks, 1, capacity_, kDim}));
    }
    return reshape(travel(cat(outputs, 1)), {kExperts * capacity_, kDim});
  }

  std::int64_t capacity_;
  const ts::RankGroup* ep_;
};

int main() {
  ts::run_local(4, {}, [](ts::World& world) {
    const auto mesh = ts::DeviceMesh::grid(world, {{"dp", 2}, {"ep", 2}});
    const ts::RankGroup& ep = mesh.group("ep");
    Mixture sharded(16), here(16), apart(16, &ep), small(6);
    for (std::size_t e = 0; e < kExperts; ++e) {
      ts::fully_shard(sharded.experts[e], {.mesh = ts::DeviceMesh::flat(world)});
      ts::fully_shard(apart.experts[e], {.mesh = mesh["dp"]});
      ts::set_gradient_divide_factor(apart.experts[e], 4);  // ranks: it has tokens of all of them
    }
    ts::fully_shard(sharded, {.mesh = ts::DeviceMesh::flat(world)});  // the router
    const auto key = static_cast<std::uint64_t>(world.rank());        // tokens of its own
    const Tensor x = Tensor::normal({16, kDim}, 0, 1, key, ts::f32, world.device());
    std::vector<std::pair<double, std::vector<float>>> seen;  // loss, gradients of the tokens
    for (Mixture* model : {&sharded, &here, &apart, &small}) {
      model->materialize(world.device());
      ts::nn::init(*model, {.value = 7});
      Tensor tokens = x.detach();
      tokens.require_grad();
      const Tensor loss = mse_loss((*model)(tokens), ts::raw::abs(x));
      loss.backward();
      seen.emplace_back(loss.item(), tokens.grad().to_vector<float>());
    }
    CHECK(seen[0] == seen[1] && seen[0] == seen[2]);
    CHECK(here.router.weight.grad().to_vector<float>() ==
          apart.router.weight.grad().to_vector<float>());
    for (std::size_t e = 0; e < kExperts; ++e) {  // of 64 terms in another order: 64 x 2^-24
      const Tensor of_all = sharded.experts[e].down_proj.weight.distributed_grad().full();
      if (static_cast<int>(e) / 2 != ep.rank()) continue;
      const Tensor own = apart.experts[e].down_proj.weight.distributed_grad().full();
      CHECK(mse_loss(own, of_all).item() < 2e-11 * mean(of_all * of_all).item());
    }
    CHECK(here.dropped.item() == 0 && small.dropped.item() > 0);
    if (world.rank() == 0)
      std::cout << "1. Weights that come to the tokens, and tokens that travel: one loss, "
                << seen[0].first << "\n2. Room for 6 tokens an expert drops "
                << small.dropped.item() << " of 32 choices\n";
  });
}
