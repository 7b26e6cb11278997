// Lesson 98: adapters over a frozen base in 8 bits, as QLoRA trains them.
//
//   To train a few numbers of a large model, its own weights are only read. So they may lie in a
//   byte each, with one scale a row, and what learns is a narrow product beside each layer:
//
//           ┌── codes e4m3 x scale ──▶ W, for this product alone ──▶ W x ──┐
//     x ────┤                                                              + ──▶ y
//           └── D [2, in] ──▶ U [out, 2], f32, trained ──────▶ U D x ──────┘
//
//   rank 0   rows of codes │ scales │ D │ U       gathers carry codes: a byte a weight, where f32
//   has 4 rank 1   the others
//
// store_in_8_bits says it of a model's linear layers, the head among them, before they have memory.
// Embedding::store_in_8_bits says it of a table, whose rows are decoded as they are looked up. A
// load from f32 or
// bf16 encodes what it reads, a row at a time, so that any number of ranks has the same codes. The
// layer decodes them into memory that lives for one product, in forward and once more in backward.
// A forward hook adds the adapter, whose parameters lie in the unit of the block around them.
//
// PyTorch: bitsandbytes has Linear4bit and peft the adapters. FSDP2 shards what bitsandbytes packs
// where its storage is declared in the dtype of compute.
//
// Sources: Hu and others, "LoRA", 2021; Dettmers and others, "QLoRA", 2023, whose codes have 4
// bits.
#include <cmath>
#include <iostream>
#include <memory>
#include <vector>

#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/nn/fp8.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr std::int64_t kWords = 16, kLength = 8;
constexpr int kSteps = 30;

// U D x beside what `layer` gives; 0 at first, since U is.
class Adapter : public ts::nn::Module {
 public:
  explicit Adapter(ts::nn::Linear& layer)
      : down({2, layer.weight.shape()[1]}, ts::Initializer::normal(0, 0.3)),
        up({layer.weight.shape()[0], 2}, ts::Initializer::constant(0)) {
    register_parameter("down", down);
    register_parameter("up", up);
    layer.register_module("adapter", *this);
    layer.register_forward_hook(
        [this](ts::nn::Module&, const ts::nn::CallTensors& in, const ts::nn::CallTensors& out) {
          out[0] = out[0] + ts::linear(ts::linear(in[0], down, {}), up, {});
        });
  }
  ts::Parameter down, up;
};

enum class Base { in_8_bits, in_f32 };

struct Trained {
  std::vector<double> losses;  // the mean over ranks
  std::int64_t gathered = 0;   // bytes of a block
};

static ts::nn::LlamaConfig config() {
  return {.dim = 32, .n_layers = 2, .n_heads = 4, .vocab_size = kWords, .max_seq_len = kLength};
}

// What somebody has trained before us: whole, in f32.
static ts::StateDict pretrained() {
  ts::nn::Llama model(config());
  for (const ts::Parameter& p : model.parameters())  // larger than at the start of a training
    if (p.shape().ndim() > 1) p.set_initializer(ts::Initializer::normal(0, 0.2));
  ts::nn::init(model, {1}, ts::Device::cpu());
  return model.state_dict({.memory = ts::StateMemory::host});
}

// The linear layers of the blocks.
static std::vector<ts::nn::Linear*> layers_of(ts::nn::Llama& model) {
  std::vector<ts::nn::Linear*> layers;
  for (ts::nn::LlamaBlock& b : model.blocks)
    for (ts::nn::Linear* const layer :
         {&b.self_attn.q_proj, &b.self_attn.k_proj, &b.self_attn.v_proj, &b.self_attn.o_proj,
          &b.mlp.gate_proj, &b.mlp.up_proj, &b.mlp.down_proj})
      layers.push_back(layer);
  return layers;
}

static Trained train(int ranks, Base base, ts::StateDict values) {
  Trained out;
  if (base == Base::in_f32)  // the numbers that codes stand for
    for (auto& [name, state] : values)
      if (name.find("_proj.weight") != std::string::npos || name == "lm_head.weight") {
        const auto [codes, scales] = ts::encode_rows(state.values);
        state = ts::decode_rows(codes, scales, ts::f32);
      }
  ts::run_local(ranks, {}, [&](ts::World& world) {
    ts::nn::Llama model(config());
    for (const ts::Parameter& p : model.parameters()) p.freeze();
    if (base == Base::in_8_bits) CHECK(ts::nn::store_in_8_bits(model).size() == 15);
    std::vector<std::unique_ptr<Adapter>> adapters;
    for (ts::nn::Linear* const layer : layers_of(model))
      adapters.push_back(std::make_unique<Adapter>(*layer));
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    for (ts::nn::Module* const part : model.parts()) ts::fully_shard(*part, options);
    ts::fully_shard(model, options);
    ts::nn::init(model, {2}, world.device());
    const ts::nn::LoadReport report = model.load(values, {.strict = false});
    CHECK(report.unexpected.empty());
    CHECK(report.missing.size() == 2 * adapters.size());  // their own parameters alone

    ts::optim::AdamW optimizer(model.parameters(), {.lr = 0.02});
    const std::vector<std::int32_t> text = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    const ts::Tensor all = ts::Tensor::from(text, {1, kLength + 1}, world.device());
    for (int step = 0; step < kSteps; ++step) {
      const ts::Tensor loss =
          model.loss(ts::slice(all, 1, 0, kLength), ts::slice(all, 1, 1, kLength + 1));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      const double mean = world.sum(loss.item()) / world.size();
      if (world.rank() == 0) out.losses.push_back(mean);
    }
    for (const auto& unit : ts::shard_plan(model).units)
      if (world.rank() == 0 && unit.name.find("layers.0") != std::string::npos)
        out.gathered = unit.gather_bytes;
    for (ts::nn::Linear* const layer : layers_of(model))  // nothing of the base has moved
      CHECK(!layer->weight.grad().defined());
  });
  return out;
}

static double largest_difference(const Trained& a, const Trained& b) {
  double most = 0;
  for (int i = 0; i < kSteps; ++i) {
    const auto step = static_cast<std::size_t>(i);
    most = std::max(most, std::abs(a.losses[step] - b.losses[step]));
  }
  return most;
}

int main() {
  const ts::StateDict values = pretrained();
  const Trained two = train(2, Base::in_8_bits, values), one = train(1, Base::in_8_bits, values),
                wide = train(2, Base::in_f32, values);
  std::cout << "1. Adapters of two ranks learn a line over a base in 8 bits: the loss falls from "
            << two.losses.front() << " to " << two.losses.back() << '\n';
  CHECK(two.losses.back() < 0.2 * two.losses.front());

  std::cout << "2. A block is gathered in " << two.gathered << " bytes, in f32 in " << wide.gathered
            << '\n';
  CHECK(two.gathered < wide.gathered / 2);  // adapters, norms and scales are f32 in both

  // One order of sums is another's: of products with the same numbers, 30 steps of them.
  std::cout << "3. Beside products of the same numbers in f32, losses differ by "
            << largest_difference(two, wide) << " at most, beside one rank by "
            << largest_difference(two, one) << '\n';
  CHECK(largest_difference(two, wide) < 1e-5);
  CHECK(largest_difference(two, one) < 1e-5);
}
