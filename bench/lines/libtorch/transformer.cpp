// A transformer with QK-norm and a learned relative position bias, recomputed by block.
#include <torch/torch.h>

#include <cstdio>

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

constexpr int kVocab = 16, kLength = 32, kDim = 64, kHeads = 4, kBlocks = 2, kBatch = 32;

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

// block(x), which keeps x only and runs again in backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        BlockImpl* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<std::int64_t>(block);
    return block->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradient) {
    const torch::AutoGradMode enabled(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    reinterpret_cast<BlockImpl*>(context->saved_data["block"].toInt())
        ->forward(x)
        .backward(gradient[0]);
    return {x.grad(), {}};
  }
};

struct Transformer : nn::Module {
  Transformer() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = Recompute::apply(x, block->as<BlockImpl>());
    return head(norm(x));
  }
  nn::Embedding embedding{register_module("embedding", nn::Embedding(kVocab, kDim))};
  nn::ModuleList blocks{register_module("blocks", nn::ModuleList())};
  RMSNorm norm{register_module("norm", RMSNorm(kDim))};
  nn::Linear head{register_module("head", nn::Linear(kDim, kVocab))};
};

int main() {
  torch::manual_seed(1);
  Transformer model;
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(3e-3));

  double first = 0, last = 0;
  for (int step = 0; step < 250;
       ++step) {  // token t is token t - 4; only the first three are unknown
    const Tensor tokens = torch::randint(kVocab, {kBatch, 4}).repeat({1, kLength / 4});
    const Tensor targets = tokens.roll(-1, 1);
    const Tensor loss = F::cross_entropy(model.forward(tokens).flatten(0, 1), targets.flatten());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f -> %.3f\n", first, last);
  if (last > 0.5) throw std::runtime_error("it did not learn");
}
