// A transformer with QK-norm and a learned relative position bias, sharded and recomputed by block.
#include <cstdio>
#include <tessera/tessera.hpp>

namespace ts = tessera;
namespace nn = ts::nn;
using ts::Tensor;

constexpr int kVocab = 16, kLength = 32, kDim = 64, kHeads = 4, kBlocks = 2, kBatch = 8;

struct Attention : nn::Module {
  Attention() {
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("q_norm", q_norm);
    register_module("k_norm", k_norm);
    register_parameter("bias", bias);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const Tensor heads = reshape(qkv(x), {x.size(0), kLength, 3, kHeads, kDim / kHeads});
      const Tensor q = q_norm(select(heads, 2, 0)), k = k_norm(select(heads, 2, 1));
      const Tensor place = Tensor::arange(kLength, ts::i64, x.device());
      const Tensor distance = clamp(unsqueeze(place, 1) - place, 0, {});
      const Tensor y = scaled_dot_product_attention(
          transpose(q, 1, 2), transpose(k, 1, 2), transpose(select(heads, 2, 2), 1, 2),
          {.bias = index(bias, {ts::Range{}, distance}), .is_causal = true});
      return out(flatten(transpose(y, 1, 2), 2));
    });
  }
  nn::Linear qkv{kDim, 3 * kDim}, out{kDim, kDim};
  nn::RMSNorm q_norm{kDim / kHeads}, k_norm{kDim / kHeads};
  ts::Parameter bias{{kHeads, kLength}, ts::Initializer()};
};

struct Block : nn::Module {
  Block() {
    register_module("attention", attention);
    register_module("mlp", mlp);
    register_module("norm1", norm1);
    register_module("norm2", norm2);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const Tensor y = x + attention(norm1(x));
      return y + mlp(norm2(y));
    });
  }
  Attention attention;
  nn::GeluMlp mlp{kDim, 4 * kDim};
  nn::RMSNorm norm1{kDim}, norm2{kDim};
};

struct Transformer : nn::Module {
  Transformer() {
    for (int i = 0; i < kBlocks; ++i) blocks.emplace_back();
    register_module("embedding", embedding);
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
  }
  Tensor operator()(const Tensor& tokens) {
    return call([&] {
      Tensor x = embedding(tokens);
      for (Block& block : blocks) x = ts::recompute(std::ref(block), x);
      return head(norm(x));
    });
  }
  nn::Embedding embedding{kVocab, kDim};
  nn::ModuleList<Block> blocks;
  nn::RMSNorm norm{kDim};
  nn::Linear head{kDim, kVocab};
};

int main() {
  return ts::run({.program = "transformer", .ranks = 4}, [](ts::World& world) {
    Transformer model;
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    for (Block& block : model.blocks) ts::fully_shard(block, options);
    ts::fully_shard(model, options);
    model.materialize(world.device());
    nn::init(model, {.value = 1});
    ts::optim::AdamW optimizer(model.parameters(), {.lr = 3e-3, .weight_decay = 0.01});

    double first = 0, last = 0;
    for (int step = 0; step < 250; ++step) {  // token t is token t - 4: the loss can fall to 4/32
      const Tensor start =
          ts::randint(0, kVocab, {kBatch, 4}, 4 * step + world.rank(), ts::i64, world.device());
      const Tensor tokens = repeat(start, {1, kLength / 4});
      const Tensor targets = roll(tokens, -1, 1);
      const Tensor loss = cross_entropy(flatten(model(tokens), 0, 1), flatten(targets));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = world.sum(loss.item()) / world.size();
      if (step == 0) first = last;
    }
    if (world.rank() == 0) std::printf("loss %.3f -> %.3f\n", first, last);
    if (last > 0.5) throw std::runtime_error("it did not learn");
  });
}
