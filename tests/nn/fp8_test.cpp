// Which layers of a model multiply in 8-bit floats, and that each does what linear_fp8 does.
#include "tessera/nn/fp8.hpp"

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/nn/helpers.hpp"
#include "tests/support/launches.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Names = std::vector<std::string>;

std::vector<float> result_and_gradients(nn::Module& module, const Tensor& y,
                                        const Tensor& gradient) {
  std::vector<float> all = y.to_vector<float>();
  y.backward(gradient);
  for (const auto& [name, p] : module.named_parameters()) {
    if (!p.trainable()) continue;
    for (const float g : p.grad().to_vector<float>()) all.push_back(g);
  }
  module.zero_grad();
  return all;
}

}  // namespace

TEST_CASE("set_fp8 takes the linear layers that fit, but the head and those that are named",
          "[nn]") {
  nn::LlamaConfig config{
      .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 48, .vocab_size = 64};
  nn::Llama model(config);
  const Names all = nn::set_fp8(model, Fp8Recipe::tensorwise);
  CHECK(all.size() == 14);
  CHECK(all[0] == "model.layers.0.self_attn.q_proj");
  CHECK_FALSE(model.head.product.fp8());
  CHECK(model.blocks[1].mlp.down_proj.product.fp8() == Fp8Recipe::tensorwise);
  nn::Llama other(config);
  CHECK(nn::set_fp8(other, Fp8Recipe::blockwise, {.skip = {"down_proj", "layers.1"}}).size() == 6);
  CHECK_FALSE(other.blocks[0].mlp.down_proj.product.fp8());
  CHECK(other.blocks[0].mlp.up_proj.product.fp8() == Fp8Recipe::blockwise);
  CHECK_THROWS_WITH(nn::set_fp8(other, Fp8Recipe::blockwise, {.skip = {"up_proj", "w1"}}),
                    "set_fp8: no linear layer has 'w1' in its name; one layer is "
                    "'model.layers.0.self_attn.q_proj'");
  CHECK_THROWS_WITH(nn::set_fp8(other, Fp8Recipe::blockwise, {.skip = {"up_proj", ""}}),
                    "set_fp8: skip has an empty text, which would skip every layer; leave it out");
  config.ffn_dim = 40;  // which 16 does not divide
  nn::Llama narrow(config);
  CHECK(nn::set_fp8(narrow, Fp8Recipe::tensorwise).size() == 8);
  CHECK_FALSE(narrow.blocks[0].mlp.up_proj.product.fp8());
  CHECK_THROWS_AS(narrow.blocks[0].mlp.up_proj.product.set_fp8(Fp8Recipe::tensorwise),
                  ContractError);
  CHECK_THROWS_AS(model.head.product.set_fp8(Fp8Recipe::tensorwise), ContractError);
}

TEST_CASE("a linear layer in fp8 has the bits of linear_fp8, and back again those of linear",
          "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Linear layer(48, 32, draw.device);
  randomize(layer, draw);
  const Tensor x = draw.tensor({2, 16, 48}), g = draw.tensor({2, 16, 32});
  const std::vector<float> plain = result_and_gradients(layer, layer(x), g);
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::blockwise}) {
    layer.product.set_fp8(recipe);
    const std::vector<float> in_layer = result_and_gradients(layer, layer(x), g);
    CHECK(in_layer != plain);
    CHECK(in_layer ==
          result_and_gradients(layer, linear_fp8(x, layer.weight, layer.bias.value(), recipe), g));
  }
  layer.product.set_fp8({});
  CHECK(result_and_gradients(layer, layer(x), g) == plain);
}

TEST_CASE("layers with GELU between them are in fp8 each for itself", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::GeluMlp mlp(32, 64, draw.device);
  randomize(mlp, draw);
  const Tensor x = draw.tensor({16, 32}), g = draw.tensor({16, 32});
  for (const bool first : {true, false})
    for (const bool second : {true, false}) {
      const auto set = [](nn::Linear& layer, bool on) {
        layer.product.set_fp8(on ? std::optional(Fp8Recipe::tensorwise) : std::nullopt);
      };
      set(mlp.c_fc, first);
      set(mlp.c_proj, second);
      CHECK(result_and_gradients(mlp, mlp(x), g) ==
            result_and_gradients(mlp, mlp.c_proj(gelu(mlp.c_fc(x))), g));
    }
}

TEST_CASE("projections that read one input round it once, and what lies elsewhere anew", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::SwigluMlp mlp(32, 48, draw.device);
  randomize(mlp, draw);
  nn::set_fp8(mlp, Fp8Recipe::tensorwise);
  const Tensor x = draw.tensor({16, 32}), g = draw.tensor({16, 32});
  std::vector<float> shared;
  {
    const Launches launches(draw.device);
    const Tensor y = mlp(x);
    draw.device.synchronize();
    CHECK(launches.of("quantize") == 5);  // three weights, x, what down_proj reads
    CHECK(launches.of("quantize_swiglu") == 1);
    shared = result_and_gradients(mlp, y, g);
  }
  CHECK(shared ==
        result_and_gradients(mlp, mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x))), g));

  const SharedFp8Input scope;
  const Tensor first = mlp.up_proj(x), again = mlp.up_proj(x * 2.0), written = x * 1.0;
  CHECK(again.to_vector<float>() == (first * 2.0).to_vector<float>());  // scales are powers of two
  const std::vector<float> before = mlp.up_proj(written).to_vector<float>();
  raw::copy_into(written, x * 2.0);
  CHECK(mlp.up_proj(written).to_vector<float>() != before);
}

namespace {

// The bits of a block's result and gradients, and how its norms and SwiGLU were launched.
struct BlockRun {
  std::vector<float> bits;
  std::uint64_t norms, rounded_norms, swiglus, rounded_swiglus;
};
template <class Block>
BlockRun run_block(Block& block, const Tensor& x, const Tensor& g) {
  const Launches launches(x.device());
  BlockRun run;
  run.bits = result_and_gradients(block, block(x), g);
  x.device().synchronize();
  const auto count = [&](std::initializer_list<const char*> names) {
    std::uint64_t all = 0;
    for (const char* name : names) all += launches.of(name);
    return all;
  };
  run.norms = count({"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"});
  run.rounded_norms = count({"quantize_norm"});
  run.swiglus = count({"swiglu"}) - count({"swiglu_backward"});
  run.rounded_swiglus = count({"quantize_swiglu"});
  return run;
}

}  // namespace

TEST_CASE("in a block norms and SwiGLU round for the layers behind them, where nobody looks",
          "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.tensor({2, 16, 32}), g = draw.tensor({2, 16, 32});
  const nn::ForwardPreHook look = [](nn::Module&, const nn::CallTensors&) {};
  const nn::ForwardHook watch = [](nn::Module&, const nn::CallTensors&, const nn::CallTensors&) {};
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::blockwise})
    for (const nn::Projections projections : {nn::Projections::separate, nn::Projections::fused}) {
      nn::LlamaConfig config{
          .dim = 32, .n_layers = 1, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 48};
      config.projections = projections;
      nn::LlamaBlock block(config, std::make_shared<nn::Rotary>(16, 8, 1e4), draw.device);
      randomize(block, draw);
      nn::set_fp8(block, recipe);
      const BlockRun fused = run_block(block, x, g);
      CHECK(fused.rounded_norms == 2);
      CHECK(fused.rounded_swiglus == 1);
      CHECK(fused.swiglus == 0);
      {
        const NoGradGuard no_grad;  // one form of each
        CHECK(block(x).to_vector<float>() ==
              std::vector<float>(fused.bits.begin(), fused.bits.begin() + x.numel()));
      }
      // Who looks at what a layer gives or reads gets it whole.
      {
        nn::HookHandle watched[] = {block.input_layernorm.register_forward_hook(watch),
                                    block.mlp.register_forward_pre_hook(look),
                                    block.mlp.down_proj.register_forward_pre_hook(look)};
        const BlockRun seen = run_block(block, x, g);
        CHECK(seen.rounded_norms == 0);
        CHECK(seen.rounded_swiglus == 0);
        CHECK(seen.bits == fused.bits);
        for (nn::HookHandle& hook : watched) hook.remove();
      }
      // A frozen layer reads one form, and one without 8 bits none.
      block.mlp.down_proj.weight.freeze();
      (projections == nn::Projections::fused ? block.self_attn.qkv_proj : block.self_attn.k_proj)
          .product.set_fp8({});
      const BlockRun some = run_block(block, x, g);
      CHECK(some.rounded_norms == 1);
      CHECK(some.rounded_swiglus == 0);
    }
  nn::Gpt2Block block({.dim = 32, .n_layers = 1, .n_heads = 4}, draw.device);
  randomize(block, draw);
  nn::set_fp8(block, Fp8Recipe::tensorwise);
  const BlockRun fused = run_block(block, x, g);
  CHECK(fused.norms == 2);
  CHECK(fused.rounded_norms == 2);
  block.ln_1.register_forward_hook(watch);
  block.ln_2.register_forward_hook(watch);
  CHECK(run_block(block, x, g).bits == fused.bits);
}

namespace {

// Looks at nothing, but is a module of its own around its layer.
struct Wrapper : nn::Module {
  nn::Linear layer{32, 16};
  Wrapper() { register_module("layer", layer); }
  Tensor operator()(const Tensor& x) {
    return call([&](const Tensor& in) { return layer(in); }, x);
  }
};

}  // namespace

TEST_CASE("a unit or a hook that would take codes for values says so", "[nn]") {
  const World world = World::single();
  const Device& device = world.device();
  const Tensor x = Tensor::full({16, 32}, 0.7, f32, device), w = Tensor::ones({32}, f32, device);
  for (const bool is_unit : {false, true}) {
    Wrapper wrapper;
    if (is_unit)
      fully_shard(wrapper, {.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}});
    else
      wrapper.register_forward_pre_hook(
          [](nn::Module&, const nn::CallTensors& in) { in[0] = cast(in[0], bf16); });
    nn::init(wrapper, {1}, device);
    wrapper.layer.product.set_fp8(Fp8Recipe::tensorwise);
    const SharedFp8Input shared;
    const Tensor h = rms_norm(x, w, 1e-5, wrapper.layer.product.input_form());
    CHECK_THROWS_WITH(wrapper(h), Catch::Matchers::Contains("8 bits for linear_fp8"));
  }
}

TEST_CASE("one input of attention and MLP is rounded once for both", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.tensor({1, 16, 32});
  nn::GroupedQueryAttention attention({.dim = 32, .n_heads = 4}, nullptr, draw.device);
  nn::FusedAttention other(32, 4, draw.device);
  nn::SwigluMlp mlp(32, 48, draw.device);
  nn::RMSNorm norm(32, 1e-5, draw.device);
  for (nn::Module* module : std::initializer_list<nn::Module*>{&attention, &other, &mlp, &norm}) {
    randomize(*module, draw);
    if (module != &norm) nn::set_fp8(*module, Fp8Recipe::tensorwise);
  }
  const auto run = [&](InputForm form) {
    const SharedFp8Input shared;
    const Tensor h = norm(x, form);
    return (attention(h) + other(h) + mlp(h)).to_vector<float>();
  };
  CHECK(run(attention.input_form()) == run({}));
  CHECK_FALSE(nn::Linear().product.input_form());
}

TEST_CASE("a hook that comes between a recomputed block's two runs finds the kept products",
          "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.tensor({1, 16, 32}), g = draw.tensor({1, 16, 32});
  nn::LlamaBlock block({.dim = 32, .n_layers = 1, .n_heads = 4, .ffn_dim = 48},
                       std::make_shared<nn::Rotary>(16, 8, 1e4), draw.device);
  randomize(block, draw);
  nn::set_fp8(block, Fp8Recipe::tensorwise);
  const std::vector<float> plain = result_and_gradients(block, block(x), g);
  const Tensor y = recompute([&](const Tensor& in) { return block(in); }, x, {.products = 2});
  block.input_layernorm.register_forward_hook(
      [](nn::Module&, const nn::CallTensors&, const nn::CallTensors&) {});
  CHECK(result_and_gradients(block, y, g) == plain);
}
