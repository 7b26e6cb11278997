// Errors of operations: each names its operation and the line of the program that called it.
#include <functional>
#include <string_view>

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/norm.hpp"
#include "tessera/nn/sequential.hpp"
#include "tessera/tensor/make.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using Catch::Matchers::StartsWith;

namespace {

void check_names(const char* operation, int line, const std::function<void()>& f) {
  INFO(operation);
  try {
    f();
    FAIL_CHECK("no error");
  } catch (const ContractError& error) {
    CHECK_THAT(error.what(), StartsWith(std::string(operation) + ": "));
    CHECK_THAT(error.where().file_name(), Catch::Matchers::EndsWith("caller_test.cpp"));
    CHECK(error.where().line() == static_cast<std::uint_least32_t>(line));
  }
}

}  // namespace

TEST_CASE("errors of operations name the operation and the line that called it") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device), y = Tensor::zeros({4}, f32, device);
  check_names("matmul", __LINE__, [&] { matmul(x, x); });
  check_names("linear", __LINE__, [&] { linear(x, y); });
  check_names("softmax", __LINE__, [&] { softmax(x, 2); });
  check_names("log_softmax", __LINE__, [&] { log_softmax(x, -3); });
  check_names("embedding", __LINE__, [&] { embedding(x, x); });
  check_names("rms_norm", __LINE__, [&] { rms_norm(x, y, 1e-5); });
  check_names("layer_norm", __LINE__, [&] { layer_norm(x, y, y, 1e-5); });
  check_names("dropout", __LINE__, [&] { dropout(x, 2, 0, 0); });
  check_names("causal_attention", __LINE__, [&] { causal_attention(x, x, x); });
  check_names("scaled_dot_product_attention", __LINE__ + 1,
              [&] { scaled_dot_product_attention(x, x, x); });
  check_names("cross_entropy", __LINE__, [&] { cross_entropy(x, y); });
  check_names("cross_entropy", __LINE__, [&] { cross_entropy(x, y, {}); });
  check_names("nll_loss", __LINE__, [&] { nll_loss(x, y); });
  check_names("mse_loss", __LINE__, [&] { mse_loss(x, y); });
  check_names("smooth_l1_loss", __LINE__, [&] { smooth_l1_loss(x, x, {.beta = -1}); });
  check_names("kl_div", __LINE__, [&] { kl_div(x, y); });
  check_names("linear", __LINE__, [&] { linear(Tensor(), x); });
  check_names("add", __LINE__, [&] { add(x, y); });
  check_names("where", __LINE__, [&] { where(x < x, x, y); });
  check_names("outer", __LINE__, [&] { outer(x, y); });
  check_names("einsum", __LINE__, [&] { einsum("ij,jk->ik", x, x); });
}

TEST_CASE("members of tensors and layers name the line that called them") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  check_names("zeros", __LINE__, [&] { Tensor::zeros({2, -1}, f32, device); });
  check_names("normal", __LINE__, [&] { Tensor::normal({2}, 0, 1, 0, i32, device); });
  check_names("Tensor::from", __LINE__, [&] { Tensor::from({1, 2}, {3}, device); });
  check_names("item", __LINE__, [&] { (void)x.item(); });
  check_names("to_vector", __LINE__, [&] { (void)x.to_vector<double>(); });
  check_names("to_span", __LINE__, [&] { (void)x.to_span<std::int64_t>(); });
  check_names("backward", __LINE__, [&] { x.backward(); });
  check_names("require_grad", __LINE__, [&] { Tensor::arange(2, i64, device).require_grad(); });
  check_names("randint", __LINE__, [&] { randint(0, 300, {2}, 0, boolean, device); });
  // What a layer is made of is named, with the line that called the layer.
  nn::Linear linear(4, 2, device);
  check_names("linear", __LINE__, [&] { linear(x); });
  nn::Embedding embedding(5, 4, device);
  check_names("embedding", __LINE__, [&] { embedding(x); });
  nn::LayerNorm norm(4, 1e-5, device);
  check_names("layer_norm", __LINE__, [&] { norm(x); });
  nn::Sequential two(std::make_unique<nn::Linear>(3, 4, device),
                     std::make_unique<nn::Linear>(3, 4, device));
  check_names("linear", __LINE__, [&] { two(x); });
  check_names("linear", __LINE__, [&] { recompute(two, x); });
}

TEST_CASE("an operation made of others is the one that its errors name") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device), y = Tensor::zeros({4}, f32, device);
  const Tensor n = Tensor::zeros({2}, i32, device), b = Tensor::zeros({2}, boolean, device);
  check_names("masked_fill", __LINE__, [&] { masked_fill(x, x, 0); });
  check_names("square", __LINE__, [&] { square(b); });
  check_names("exp", __LINE__, [&] { exp(n); });
  check_names("pow", __LINE__, [&] { pow(x, y); });
  check_names("maximum", __LINE__, [&] { maximum(x, y); });
  check_names("sum", __LINE__, [&] { sum(x, 2); });
  check_names("stddev", __LINE__, [&] { stddev(n); });
  check_names("max", __LINE__, [&] { max(x, 5); });
  check_names("min", __LINE__, [&] { min(Tensor::zeros({0}, f32, device)); });
  check_names("topk", __LINE__, [&] { topk(x, 7); });
  check_names("cumsum", __LINE__, [&] { cumsum(x, -4); });
  check_names("reshape", __LINE__, [&] { reshape(x, {4}); });
  check_names("unsqueeze", __LINE__, [&] { unsqueeze(x, 9); });
  check_names("expand", __LINE__, [&] { expand(x, {3, 3}); });
  check_names("split", __LINE__, [&] { split(x, 0, 0); });
  check_names("cat", __LINE__, [&] { cat({x, y}, 0); });
  check_names("stack", __LINE__, [&] { stack({x, y}, 0); });
  check_names("pad", __LINE__, [&] { pad(x, {1}); });
  check_names("tril", __LINE__, [&] { tril(y); });
  check_names("index", __LINE__, [&] { index(x, {5}); });
  check_names("index_add", __LINE__, [&] { index_add(x, 0, n, y); });
  check_names("gather", __LINE__, [&] { gather(x, 3, n); });
}

TEST_CASE("errors of operators name the line where they stand") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device), y = Tensor::zeros({4}, f32, device);
  const Tensor n = Tensor::zeros({2}, i32, device), b = Tensor::zeros({2}, boolean, device);
  check_names("add", __LINE__, [&] { x + y; });
  check_names("sub", __LINE__, [&] { x - y; });
  check_names("mul", __LINE__, [&] { x* y; });
  check_names("div", __LINE__, [&] { x / y; });
  check_names("add", __LINE__, [&] { n + 0.5; });
  check_names("mul", __LINE__, [&] { 0.5 * n; });
  check_names("neg", __LINE__, [&] { -b; });
  check_names("eq", __LINE__, [&] { (void)(x == y); });
  check_names("ge", __LINE__, [&] { (void)(x >= n); });
  // What converts to a tensor is an operand, too.
  nn::Linear layer(3, 3, device);
  check_names("add", __LINE__, [&] { layer.weight + y; });
  check_names("mul", __LINE__, [&] { y* layer.weight; });
}

TEST_CASE("operands that do not broadcast are an error of their operation") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device), y = Tensor::zeros({4}, f32, device);
  CHECK_THROWS_WITH(x + y, "add: shapes [2, 3] and [4] do not broadcast");
  CHECK_THROWS_WITH(x * y, "mul: shapes [2, 3] and [4] do not broadcast");
  CHECK_THROWS_WITH(x < y, "lt: shapes [2, 3] and [4] do not broadcast");
  CHECK_THROWS_WITH(where(x < x, x, y), "where: shapes [2, 3] and [4] do not broadcast");
}

TEST_CASE("operations of floating tensors refuse others, instead of giving what nobody wrote") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::ones({1, 2, 2, 2}, i32, device), v = Tensor::ones({2}, i32, device);
  const Tensor w = Tensor::ones({2, 2}, i32, device);
  const auto refused = [](const std::function<void()>& f) {
    CHECK_THROWS_WITH(f(), Catch::Matchers::Contains("is i32") &&
                               Catch::Matchers::Contains("expected a floating dtype"));
  };
  refused([&] { dropout(x, 0.5, 0, 0); });
  refused([&] { causal_attention(x, x, x); });
  refused([&] { causal_attention(Tensor::ones({1, 2, 3, 2}, i32, device), 1); });
  refused([&] { rms_norm(x, v, 1e-5); });
  refused([&] { layer_norm(x, v, v, 1e-5); });
  refused([&] { add_rms_norm(x, x, v, 1e-5); });
  refused([&] { rope(x, RopeTables::make(4, 2, 1e4, device)); });
  refused([&] { linear(x, w); });
  refused([&] { linear_gelu(x, w); });
  refused([&] { cross_entropy(w, v); });
  refused([&] { linear_cross_entropy(w, w, {}, v, 2); });
}
