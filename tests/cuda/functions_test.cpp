// Attention, softmax and losses on emulated GPUs: the CPU's bits where the kernels are the CPU's,
// and its values where they are a GPU's, run thread by thread.
#include <cmath>
#include <functional>
#include <vector>

#include "tessera/autograd/custom_op.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/tensor/initializer.hpp"
#include "tessera/tensor/make.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Function = std::function<Tensor(const std::vector<Tensor>&)>;
struct Case {
  std::string name;
  std::vector<Shape> inputs;
  Function f;
};

Tensor classes(const Shape& shape, const Device& device) {
  return raw::cast(Tensor::uniform(shape, 0, 4.99, 9, f32, device), i64);
}
Tensor probability(const Tensor& x) { return (tanh(x) + 1.1) * 0.45; }

std::vector<Case> cases() {
  const Shape heads{2, 4, 5, 8}, keys{2, 2, 5, 8}, more{2, 2, 7, 8};
  const auto attend = [](const ScaledDotProductOptions& options) -> Function {
    return [options](const auto& x) {
      return scaled_dot_product_attention(x[0], x[1], x[2], options);
    };
  };
  return {
      {"fused attention", {heads, keys, keys}, attend({.scale = 0.3})},
      {"fused causal attention", {heads, keys, keys}, attend({.is_causal = true})},
      {"cross-attention", {heads, more, more}, attend({.is_causal = true})},
      {"attention with dropout", {heads, more, more}, attend({.dropout = 0.3, .dropout_key = 3})},
      {"attention with a mask and a bias",
       {heads, more, more, {4, 5, 7}},
       [](const auto& x) {
         const Tensor mask = x[0].device().is_meta() ? Tensor()
                                                     : classes({5, 7}, x[0].device()) >
                                                           Tensor::ones({}, i64, x[0].device());
         return scaled_dot_product_attention(x[0], x[1], x[2], {.mask = mask, .bias = x[3]});
       }},
      {"softmax", {{3, 5, 4}}, [](const auto& x) { return softmax(x[0], 1); }},
      {"log_softmax", {{3, 5, 4}}, [](const auto& x) { return log_softmax(x[0], 1); }},
      {"cross_entropy",
       {{6, 5, 2}},
       [](const auto& x) {
         const Tensor weight =
             raw::cast(Tensor::uniform({5}, 0.5, 2, 7, f32, x[0].device()), x[0].dtype());
         return cross_entropy(x[0], classes({6, 2}, x[0].device()),
                              {.weight = weight, .ignore_index = 3, .label_smoothing = 0.1});
       }},
      // The last gradient of a loss is random here, so what forward has made is multiplied.
      {"linear_cross_entropy in one order and the other",
       {{6, 4}, {5, 4}, {5}},
       [](const auto& x) {
         const Tensor targets = classes({6}, x[0].device());
         return linear_cross_entropy(x[0], x[1], x[2], targets, 4) +
                linear_cross_entropy(x[0], x[1], x[2], targets, 4, {.gradient = 0.5});
       }},
      {"nll_loss",
       {{6, 5}},
       [](const auto& x) {
         return nll_loss(x[0], classes({6}, x[0].device()), {.ignore_index = 3});
       }},
      {"mse_loss", {{4, 3}, {4, 3}}, [](const auto& x) { return mse_loss(x[0], x[1]); }},
      {"l1_loss", {{4, 3}, {4, 3}}, [](const auto& x) { return l1_loss(x[0], x[1]); }},
      {"huber_loss", {{4, 3}, {4, 3}}, [](const auto& x) { return huber_loss(x[0], x[1]); }},
      {"binary_cross_entropy",
       {{4, 3}, {4, 3}},
       [](const auto& x) { return binary_cross_entropy(probability(x[0]), probability(x[1])); }},
      {"binary_cross_entropy_with_logits",
       {{4, 3}, {4, 3}},
       [](const auto& x) { return binary_cross_entropy_with_logits(x[0], probability(x[1])); }},
      {"kl_div", {{4, 3}, {4, 3}}, [](const auto& x) {
         return kl_div(log_softmax(x[0]), softmax(x[1]));
       }}};
}

// The result, then the gradient of each input.
std::vector<std::vector<float>> run(const Case& of, DType dtype, const Device& device) {
  std::vector<Tensor> inputs;
  for (const Shape& shape : of.inputs)
    inputs.push_back(raw::cast(Tensor::normal(shape, 0, 1, 11 + inputs.size(), f32, device), dtype)
                         .require_grad());
  const Tensor y = of.f(inputs);
  y.backward(raw::cast(Tensor::normal(y.shape(), 0, 1, 5, f32, device), y.dtype()));
  std::vector<std::vector<float>> out{raw::contiguous(raw::cast(y, f32)).to_vector<float>()};
  for (const Tensor& x : inputs) out.push_back(raw::cast(x.grad(), f32).to_vector<float>());
  return out;
}

}  // namespace

TEST_CASE("attention and losses have the CPU's bits on a GPU whose kernels are the CPU's") {
  const Device cpu = Device::cpu({.executor = ExecutorKind::inlined}), gpu = queued_gpu();
  for (const DType dtype : {f32, bf16})
    for (const Case& of : cases()) {
      INFO(of.name << " in " << dtype);
      CHECK(run(of, dtype, cpu) == run(of, dtype, gpu));
    }
}

TEST_CASE(
    "attention and losses have the CPU's values on a GPU whose kernels run thread by thread") {
  // Sums of at most 35 terms below 10 in another order: some 35 roundings of 2^-24 of 10.
  const Device cpu = Device::cpu({.executor = ExecutorKind::inlined});
  const Device gpu = Device::cuda({.module = TESSERA_EMULATED_MODULE});
  for (const Case& of : cases()) {
    INFO(of.name);
    const auto ours = run(of, f32, cpu), theirs = run(of, f32, gpu);
    REQUIRE(ours.size() == theirs.size());
    double worst = 0;
    for (std::size_t i = 0; i < ours.size(); ++i)
      for (std::size_t j = 0; j < ours[i].size(); ++j)
        worst = std::max(worst, std::abs(double{ours[i][j]} - double{theirs[i][j]}));
    CHECK(worst < 2e-5);
  }
}

TEST_CASE("random tensors and initial values are the CPU's on a GPU whose kernels run by threads") {
  const Device cpu = Device::cpu({.executor = ExecutorKind::inlined});
  const Device gpu = Device::cuda({.module = TESSERA_EMULATED_MODULE});
  constexpr std::uint64_t kKey = 17;
  const auto whole = [&](const std::function<Tensor(const Device&)>& f) {
    return raw::cast(f(cpu), i64).to_vector<std::int64_t>() ==
           raw::cast(f(gpu), i64).to_vector<std::int64_t>();
  };
  CHECK(whole([&](const Device& d) { return randint(-5, 70000, {300}, kKey, i64, d); }));
  CHECK(whole([&](const Device& d) { return bernoulli(0.3, {300}, kKey, boolean, d); }));
  CHECK(whole([&](const Device& d) { return randperm(300, kKey, d); }));
  for (const Replacement replacement : {Replacement::no, Replacement::yes})
    CHECK(whole([&](const Device& d) {
      return multinomial(arange(1, 9, 1, f32, d), 5, replacement, kKey);
    }));
  const Initializer initializers[] = {
      Initializer::constant(3),
      Initializer::normal(1, 2),
      Initializer::uniform(-1, 2),
      Initializer::truncated_normal(0, 1, -0.5, 2),
      Initializer::kaiming_normal(),
      Initializer::xavier_uniform(),
      Initializer::by_index([](std::int64_t i) { return 0.5 * i; })};
  for (std::size_t i = 0; i < std::size(initializers); ++i) {
    INFO("initializer " << i);
    const Shape shape{7, 9};
    std::vector<float> values[2];
    for (const Device& device : {cpu, gpu}) {
      const Tensor out = Tensor::empty(shape, f32, device);
      initializers[i].fill(out, shape, kKey, 0);
      values[device == gpu] = out.to_vector<float>();
    }
    // log, sine, cosine and root of numbers of at most 6 in f32, in two libraries.
    for (std::size_t k = 0; k < values[0].size(); ++k)
      CHECK(std::abs(double{values[0][k]} - double{values[1][k]}) <= 32 * 6 * 0x1p-24);
  }
}

TEST_CASE("a body of one's own says that it does not run on a GPU") {
  const Tensor x = Tensor::zeros({2}, f32, queued_gpu());
  CHECK_THROWS_WITH(
      CustomOp("mine").map([](auto v) { return v; }, x),
      Catch::Matchers::Contains("mine: input 0 lies on a GPU, but this body runs on the CPU"));
}
