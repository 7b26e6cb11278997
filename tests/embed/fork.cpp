// A research code with a model, a linear layer and an optimizer of its own: copies of the library's
// headers, which tests/embed/fork has put into other files, another namespace and under other
// names. They train to the bits of the library's. So does AdamW by its formula, fused over each
// unit by FlatUpdate::for_ranges.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "my_adam.hpp"
#include "my_affine.hpp"
#include "my_fused_adam.hpp"
#include "my_model.hpp"

namespace ts = tessera;

constexpr int kSteps = 4;
constexpr std::int64_t kRows = 2, kLength = 16;

// Each step's loss, then this rank's values.
template <class Model, class Optimizer>
std::vector<float> train(ts::World& world) {
  Model model({.dim = 32, .n_layers = 2, .n_heads = 4, .vocab_size = 61, .max_seq_len = kLength});
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
  for (ts::nn::Module* part : model.parts()) ts::fully_shard(*part, options);
  ts::fully_shard(model, options);
  ts::nn::init(model, ts::nn::Seed{7}, world.device());
  Optimizer optimizer(model.parameters(), {.lr = 1e-2});
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < kRows * kLength; ++i) ids.push_back((i * i + world.rank()) % 61);
  const ts::Tensor tokens = ts::Tensor::from(ids, {kRows, kLength}, world.device());
  std::vector<float> seen;
  for (int step = 0; step < kSteps; ++step) {
    const ts::Tensor loss = model.loss(tokens, tokens);
    seen.push_back(static_cast<float>(loss.item()));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const ts::Parameter& p : model.parameters())
    for (const float value : p.shard().to_vector<float>()) seen.push_back(value);
  return seen;
}

int main(int argc, char** argv) {
  return ts::run(argc, argv, [](ts::World& world) {
    const auto expected = train<ts::nn::Llama, ts::optim::AdamW>(world);
    if (!(expected[kSteps - 1] < expected[0])) throw std::runtime_error("nothing was learnt");
    if (train<mine::Model, mine::Adam>(world) != expected)
      throw std::runtime_error("copies of the headers train to other bits");
    if (train<mine::Model, mine::FusedAdam>(world) != expected)
      throw std::runtime_error("AdamW by its formula trains to other bits");
    if (world.rank() == 0)
      std::printf("forks: loss %.4f to %.4f\n", static_cast<double>(expected[0]),
                  static_cast<double>(expected[kSteps - 1]));
  });
}
