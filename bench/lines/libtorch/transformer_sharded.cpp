// A transformer with QK-norm and a learned relative position bias, sharded by hand and recomputed
// by block.
#include <torch/torch.h>

#include <cstdio>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

constexpr int kVocab = 16, kLength = 32, kDim = 64, kHeads = 4, kBlocks = 2, kBatch = 8, kRanks = 4;

struct RMSNormImpl : nn::Module {
  explicit RMSNormImpl(int dim) : weight(register_parameter("weight", torch::ones(dim))) {}
  Tensor forward(const Tensor& x) { return rms_norm(x, weight.sizes(), weight, 1e-5); }
  Tensor weight;
};
TORCH_MODULE(RMSNorm);

struct AttentionImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor heads = qkv(x).view({x.size(0), kLength, 3, kHeads, kDim / kHeads});
    const Tensor q = q_norm(heads.select(2, 0)), k = k_norm(heads.select(2, 1));
    const Tensor place = torch::arange(kLength), distance = place.unsqueeze(1) - place;
    const Tensor scores = bias.index({torch::indexing::Slice(), distance.clamp_min(0)})
                              .masked_fill(distance < 0, -INFINITY);
    const Tensor y = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                                  heads.select(2, 2).transpose(1, 2), scores);
    return out(y.transpose(1, 2).flatten(2));
  }
  nn::Linear qkv{register_module("qkv", nn::Linear(kDim, 3 * kDim))};
  nn::Linear out{register_module("out", nn::Linear(kDim, kDim))};
  RMSNorm q_norm{register_module("q_norm", RMSNorm(kDim / kHeads))};
  RMSNorm k_norm{register_module("k_norm", RMSNorm(kDim / kHeads))};
  Tensor bias = register_parameter("bias", torch::zeros({kHeads, kLength}));
};
TORCH_MODULE(Attention);

struct BlockImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention(norm1(x));
    return y + mlp->forward(norm2(y));
  }
  Attention attention{register_module("attention", Attention())};
  nn::Sequential mlp{register_module(
      "mlp", nn::Sequential(nn::Linear(kDim, 4 * kDim), nn::GELU(), nn::Linear(4 * kDim, kDim)))};
  RMSNorm norm1{register_module("norm1", RMSNorm(kDim))};
  RMSNorm norm2{register_module("norm2", RMSNorm(kDim))};
};
TORCH_MODULE(Block);

// The parameters of a module, of which each rank keeps a part of one flat array.
class Unit {
 public:
  Unit(const std::vector<Tensor>& parameters, c10d::ProcessGroupGloo& group)
      : parameters_(parameters), group_(group) {
    for (const Tensor& p : parameters_) shapes_.push_back(p.sizes().vec());
    const Tensor whole = flatten(parameters_);
    shard = whole.chunk(kRanks)[group.getRank()].clone().set_requires_grad(true);
    free();
  }
  void gather() {
    Tensor whole = torch::empty(shard.numel() * kRanks), mine = shard.detach();
    group_.all_gather_single(whole, mine)->wait();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const std::int64_t numel = c10::multiply_integers(shapes_[i]);
      parameters_[i].set_data(whole.narrow(0, at, numel).view(shapes_[i]));
      at += numel;
    }
  }
  void reduce() {
    std::vector<Tensor> gradients;
    for (Tensor& p : parameters_)
      gradients.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
    Tensor whole = flatten(gradients) / kRanks, mine = torch::empty_like(shard);
    group_.reduce_scatter_single(mine, whole)->wait();
    shard.mutable_grad() = mine;
    free();
  }
  void free() {
    for (Tensor& p : parameters_) {
      p.mutable_grad().reset();
      p.set_data(torch::empty(0));
    }
  }

  Tensor shard;

 private:
  static Tensor flatten(const std::vector<Tensor>& parts) {  // padded to a multiple of the ranks
    std::vector<Tensor> flat;
    for (const Tensor& part : parts) flat.push_back(part.detach().flatten());
    const Tensor whole = cat(flat);
    return constant_pad_nd(whole, {0, (kRanks - whole.numel() % kRanks) % kRanks});
  }
  std::vector<Tensor> parameters_;
  std::vector<std::vector<std::int64_t>> shapes_;
  c10d::ProcessGroupGloo& group_;
};

// block(x), which keeps x only; gathered for the call, and again for the second one in backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        BlockImpl* block, Unit* unit) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<std::int64_t>(block);
    context->saved_data["unit"] = reinterpret_cast<std::int64_t>(unit);
    unit->gather();
    const Tensor y = block->forward(x);
    unit->free();
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradient) {
    const torch::AutoGradMode enabled(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* block = reinterpret_cast<BlockImpl*>(context->saved_data["block"].toInt());
    auto* unit = reinterpret_cast<Unit*>(context->saved_data["unit"].toInt());
    unit->gather();
    block->forward(x).backward(gradient[0]);
    unit->reduce();
    return {x.grad(), {}, {}};
  }
};

struct Transformer : nn::Module {
  Transformer() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  void shard(c10d::ProcessGroupGloo& group) {
    std::vector<Tensor> rest;
    for (const auto& part : {embedding->parameters(), norm->parameters(), head->parameters()})
      rest.insert(rest.end(), part.begin(), part.end());
    units.emplace_back(rest, group);
    for (const auto& block : *blocks) units.emplace_back(block->parameters(), group);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (int i = 0; i < kBlocks; ++i)
      x = Recompute::apply(x, blocks[i]->as<BlockImpl>(), &units[i + 1]);
    return head(norm(x));
  }
  nn::Embedding embedding{register_module("embedding", nn::Embedding(kVocab, kDim))};
  nn::ModuleList blocks{register_module("blocks", nn::ModuleList())};
  RMSNorm norm{register_module("norm", RMSNorm(kDim))};
  nn::Linear head{register_module("head", nn::Linear(kDim, kVocab))};
  std::vector<Unit> units;  // the rest, then the blocks
};

void train(int rank, Transformer& model, c10d::ProcessGroupGloo& group) {
  model.shard(group);
  std::vector<Tensor> shards;
  for (Unit& unit : model.units) shards.push_back(unit.shard);
  torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(3e-3));

  auto generator = torch::make_generator<at::CPUGeneratorImpl>(rank);
  double first = 0, last = 0;
  for (int step = 0; step < 250;
       ++step) {  // token t is token t - 4; only the first three are unknown
    const Tensor tokens =
        torch::randint(kVocab, {kBatch, 4}, generator, torch::kLong).repeat({1, kLength / 4});
    const Tensor targets = tokens.roll(-1, 1);
    model.units[0].gather();
    const Tensor loss = F::cross_entropy(model.forward(tokens).flatten(0, 1), targets.flatten());
    loss.backward();
    model.units[0].reduce();
    optimizer.step();
    std::vector<Tensor> sum{loss.detach().clone()};
    group.allreduce(sum)->wait();
    last = sum[0].item<double>() / kRanks;
    if (step == 0) first = last;
  }
  if (rank == 0) std::printf("loss %.3f -> %.3f\n", first, last);
  if (last > 0.5) throw std::runtime_error("it did not learn");
}

int main() {
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    torch::manual_seed(1);
    ranks.emplace_back([&store, rank, model = std::make_shared<Transformer>()] {
      c10d::ProcessGroupGloo group(store, rank, kRanks,
                                   c10d::ProcessGroupGloo::Options::create_default());
      train(rank, *model, group);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
