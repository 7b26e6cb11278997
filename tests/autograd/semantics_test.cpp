// PyTorch's semantics where they could be others: ties, NaN, infinities, empty tensors, dtypes.
#include <cmath>
#include <limits>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::any_device;

namespace {

using Floats = std::vector<float>;
using List = std::vector<std::int64_t>;
const float kNan = std::numeric_limits<float>::quiet_NaN(),
            kInf = std::numeric_limits<float>::infinity();

Tensor trainable_values(const Floats& values, const Device& device) {
  Tensor x = Tensor::from(values, {static_cast<std::int64_t>(values.size())}, device);
  return x.require_grad();
}
std::vector<bool> booleans(const Tensor& x) {
  const List v = raw::cast(x, i64).to_vector<std::int64_t>();
  return {v.begin(), v.end()};
}

}  // namespace

TEST_CASE("what is cast to integers or boolean has no history") {
  const Tensor x = trainable_values({1.5, -2}, any_device());
  for (const DType dtype : {i32, i64, boolean}) CHECK_FALSE(cast(x, dtype).requires_grad());
  CHECK(cast(x, f64).requires_grad());
}

TEST_CASE("gradients at ties and kinks are PyTorch's") {
  const Device device = any_device();
  const auto gradient = [&](const Floats& values, Tensor (*f)(const Tensor&)) {
    const Tensor x = trainable_values(values, device);
    sum(f(x)).backward();
    return x.grad().to_vector<float>();
  };
  CHECK(gradient({1, 3, 3}, [](const Tensor& x) { return amax(x); }) == Floats{0, 0.5, 0.5});
  CHECK(gradient({1, 3, 1}, [](const Tensor& x) { return min(x); }) == Floats{0.5, 0, 0.5});
  CHECK(gradient({1, 3, 1}, [](const Tensor& x) { return min(x, 0); }) == Floats{1, 0, 0});
  CHECK(gradient({0, 2}, [](const Tensor& x) { return maximum(x, x * 0.5); }) == Floats{0.75, 1});
  CHECK(gradient({-1, 0, 2}, [](const Tensor& x) { return clamp(x, 0, 2); }) == Floats{0, 1, 1});
  CHECK(gradient({-2, 0, 2}, [](const Tensor& x) { return abs(x); }) == Floats{-1, 0, 1});
  CHECK(gradient({0, 1}, [](const Tensor& x) { return leaky_relu(x, 0.25); }) == Floats{0.25, 1});
  CHECK(gradient({0, 0}, [](const Tensor& x) { return norm(x); }) == Floats{0, 0});
  CHECK(gradient({3, 3}, [](const Tensor& x) { return stddev(x); }) == Floats{0, 0});
  CHECK(gradient({1000, -1000}, [](const Tensor& x) { return elu(x); }) == Floats{1, 0});
  CHECK(gradient({0, 2}, [](const Tensor& x) { return pow(x, 0.0); }) == Floats{0, 0});
  CHECK(gradient({0, 1}, [](const Tensor& x) { return pow(0.0, x); }) == Floats{0, 0});
  CHECK(gradient({1.5, -0.5}, [](const Tensor& x) { return floor(x) + round(x) + sign(x); }) ==
        Floats{0, 0});
  CHECK(gradient({-kInf, -kInf}, [](const Tensor& x) { return logsumexp(x); }) == Floats{0, 0});
}

TEST_CASE("NaN wins in extremes, is largest in orders, and is known") {
  const Device device = any_device();
  const Tensor x = Tensor::from({1, kNan, kInf, -kInf}, {4}, device);
  CHECK(std::isnan(max(x).item()));
  CHECK(std::isnan(maximum(x, Tensor::full({}, 5, f32, device)).to_vector<float>()[1]));
  CHECK(std::isnan(clamp(x, 0, 2).to_vector<float>()[1]));
  CHECK(argmin(x).item() == 1);
  CHECK(argsort(x).to_vector<std::int64_t>() == List{3, 0, 2, 1});
  CHECK(topk(x, 2).indices.to_vector<std::int64_t>() == List{1, 2});
  CHECK(booleans(isnan(x)) == std::vector<bool>{false, true, false, false});
  CHECK(booleans(isinf(x)) == std::vector<bool>{false, false, true, true});
  CHECK(booleans(isfinite(x)) == std::vector<bool>{true, false, false, false});
  CHECK(booleans(x != x) == booleans(isnan(x)));
  const Tensor whole = Tensor::arange(2, i32, device);
  CHECK(booleans(isinf(whole)) == std::vector<bool>{false, false});
  CHECK(booleans(isfinite(whole)) == std::vector<bool>{true, true});
  CHECK(logsumexp(Tensor::from({kInf, 1}, {2}, device)).item() == kInf);
  CHECK(logsumexp(Tensor::from({1000, 1000}, {2}, device)).item() == Approx(1000 + std::log(2.0)));
}

TEST_CASE("numbers on either side, logic and comparisons") {
  const Device device = any_device();
  const Tensor x = Tensor::from({1, 2, 4}, {3}, device), whole = Tensor::arange(3, i64, device);
  CHECK((1.0 - x).to_vector<float>() == Floats{0, -1, -3});
  CHECK((1.0 / x).to_vector<float>() == Floats{1, 0.5, 0.25});
  CHECK((1.0 + x).to_vector<float>() == Floats{2, 3, 5});
  CHECK((5 - whole).to_vector<std::int64_t>() == List{5, 4, 3});
  CHECK(booleans(x > 1) == std::vector<bool>{false, true, true});
  CHECK(booleans(1.0 < x) == booleans(x > 1));
  CHECK(booleans(2.0 <= x) == booleans(x >= 2));
  CHECK(booleans(2.0 > x) == booleans(x < 2));
  CHECK(booleans(1.0 >= x) == booleans(x <= 1));
  CHECK(clamp(x, 2).to_vector<float>() == maximum(x, x * 0 + 2).to_vector<float>());
  CHECK(booleans(whole == 1) == std::vector<bool>{false, true, false});
  CHECK(booleans(logical_and(x > 1, x <= 2)) == std::vector<bool>{false, true, false});
  CHECK(booleans(logical_or(x < 2, x >= 4)) == std::vector<bool>{true, false, true});
  CHECK(booleans(logical_not(x != 2)) == std::vector<bool>{false, true, false});
  CHECK(any(x > 3).item() == 1);
  CHECK(all(x > 3).item() == 0);
  CHECK(any(Tensor::zeros({0}, f32, device)).item() == 0);
  CHECK(booleans(all(Tensor::zeros({2, 0}, i32, device), 1)) == std::vector<bool>{true, true});
  CHECK(where(x > 1, x, 0.0).to_vector<float>() == Floats{0, 2, 4});
  CHECK(where(x > 1, -1.0, x).to_vector<float>() == Floats{1, -1, -1});
  CHECK(masked_fill(whole, whole > 0, 7).to_vector<std::int64_t>() == List{0, 7, 7});
  CHECK(abs(neg(whole)).to_vector<std::int64_t>() == List{0, 1, 2});
  CHECK(sign(whole).to_vector<std::int64_t>() == List{0, 1, 1});
  CHECK(floor(whole).to_vector<std::int64_t>() == List{0, 1, 2});
  CHECK(round(Tensor::from({0.5, 1.5, -2.5}, {3}, device)).to_vector<float>() == Floats{0, 2, -2});
  CHECK(cumsum(whole > 0, 0).to_vector<std::int64_t>() == List{0, 1, 2});
  CHECK(prod(Tensor::from(List{2, 3, 4, 5, 6}, {5}, device)).item() == 720);
  CHECK(prod(Tensor::zeros({0}, f32, device)).item() == 1);
  CHECK(var(x, {}, 0).item() == Approx(14.0 / 9));
  CHECK(std::isnan(var(Tensor::ones({1}, f32, device)).item()));
}

TEST_CASE("shapes that PyTorch gives") {
  const Device device = any_device();
  const Tensor x = Tensor::zeros({1, 5, 1}, f32, device);
  CHECK(squeeze(x).shape() == Shape{5});
  CHECK(squeeze(x, 1).shape() == x.shape());
  CHECK(squeeze(x, -1).shape() == Shape{1, 5});
  CHECK(unsqueeze(squeeze(x), 0).shape() == Shape{1, 5});
  CHECK(flatten(Tensor::zeros({}, f32, device)).shape() == Shape{1});
  CHECK(flatten(x, 1).shape() == Shape{1, 5});
  CHECK(chunk(x, 3, 1).size() == 3);
  CHECK(chunk(x, 4, 1).size() == 3);
  CHECK(repeat(squeeze(x), {2, 3}).shape() == Shape{2, 15});
  CHECK(roll(Tensor::arange(4, i64, device), 1, 0).to_vector<std::int64_t>() == List{3, 0, 1, 2});
  CHECK(flip(Tensor::arange(3, i64, device), 0).to_vector<std::int64_t>() == List{2, 1, 0});
  CHECK(repeat_interleave(Tensor::arange(2, i64, device), 2, 0).to_vector<std::int64_t>() ==
        List{0, 0, 1, 1});
  CHECK(pad(Tensor::ones({1, 2}, i64, device), {1, 0, 0, 1}, 5).to_vector<std::int64_t>() ==
        List{5, 1, 1, 5, 5, 5});
  CHECK(pad(Tensor::arange(3, i64, device), {-1, 1}).to_vector<std::int64_t>() == List{1, 2, 0});
  CHECK(pad(Tensor::arange(3, i64, device), {-2, -1}).numel() == 0);
  CHECK(tril(Tensor::ones({2, 3}, i64, device), 1).to_vector<std::int64_t>() ==
        List{1, 1, 0, 1, 1, 1});
  CHECK(triu(Tensor::ones({2, 3}, i64, device)).to_vector<std::int64_t>() ==
        List{1, 1, 1, 0, 1, 1});
  CHECK(outer(Tensor::ones({2}, f32, device), Tensor::ones({3}, f32, device)).shape() ==
        Shape{2, 3});
}

TEST_CASE("a tensor of shape [] is one element along dimension 0") {
  const Device device = any_device();
  const Tensor x = Tensor::full({}, 3, f32, device), zero = Tensor::zeros({1}, i64, device);
  CHECK(sum(x, 0).item() == 3);
  CHECK(cumsum(x, -1).shape() == Shape{});
  CHECK(sort(x, 0).indices.shape() == Shape{});
  CHECK(topk(x, 1).values.item() == 3);
  CHECK(max_with_index(x, 0).indices.item() == 0);
  CHECK(index_select(x, 0, zero).item() == 3);
  CHECK(index_copy(x, 0, zero, Tensor::ones({}, f32, device)).item() == 1);
  CHECK(gather(x, 0, squeeze(zero)).item() == 3);
  CHECK(scatter(x, 0, squeeze(zero), 5).item() == 5);
  CHECK(transpose(x, 0, -1).shape() == Shape{});
  CHECK_THROWS_AS(cumsum(x, 1), ContractError);
}

TEST_CASE("operations on meta give shapes and dtypes alone") {
  const Device meta = Device::meta();
  Tensor x = Tensor::empty({4, 6}, f32, meta);
  x.require_grad();
  const Tensor rows = Tensor::empty({3}, i64, meta);
  CHECK(index(x, {Range{0, 4, 2}, rows}).shape() == Shape{2, 3});
  CHECK(index_put(x, {rows}, Tensor::empty({6}, f32, meta)).shape() == x.shape());
  CHECK(topk(x, 2).indices.shape() == Shape{4, 2});
  CHECK(cumsum(rows, 0).dtype() == i64);
  CHECK(einsum("ij,kj->ik", x, x).shape() == Shape{4, 4});
  CHECK(multinomial(x, 2, Replacement::no, 1).shape() == Shape{4, 2});
  CHECK(prod(x, 1).shape() == Shape{4});
  CHECK(stddev(elu(clamp(x, -1, {})), {0, 1}).shape() == Shape{});
  sum(pad(tril(flip(x, 0)), {1, 1}) * pow(2.0, pad(x, {2, 0}))).backward();
  CHECK(x.grad().shape() == x.shape());
}

TEST_CASE("vectors in products, integers in sums of products") {
  const Device device = any_device();
  const Tensor v = Tensor::from({1, 2}, {2}, device),
               m = Tensor::from({1, 2, 3, 4}, {2, 2}, device);
  CHECK(matmul(v, v).item() == 5);
  CHECK(matmul(m, v).to_vector<float>() == Floats{5, 11});
  CHECK(matmul(v, m).to_vector<float>() == Floats{7, 10});
  CHECK(matmul(expand(m, {3, 2, 2}), v).shape() == Shape{3, 2});
  const Tensor whole = cast(m, i64);
  CHECK(einsum("ij,jk->ik", whole, whole).to_vector<std::int64_t>() == List{7, 10, 15, 22});
  CHECK(prod(cast(m, i32), 0).to_vector<std::int64_t>() == List{3, 8});
}

TEST_CASE("what cannot be is one line that says what to do") {
  const Device device = any_device();
  const Tensor x = Tensor::zeros({2, 0}, f32, device), whole = Tensor::arange(3, i64, device);
  CHECK_THROWS_WITH(max(x, 1), Catch::Contains("max: [2, 0] has no element"));
  CHECK_THROWS_WITH(amin(x), Catch::Contains("amin: [2, 0] has no element"));
  CHECK_THROWS_WITH(argmax(x), Catch::Contains("argmax: [2, 0] has no element"));
  CHECK(max(x, 0).shape() == Shape{0});
  CHECK_THROWS_WITH(sin(whole),
                    Catch::Contains("sin: the tensor is i64") && Catch::Contains("cast it first"));
  CHECK_THROWS_WITH(pow(whole, 2.0), Catch::Contains("pow: the operands are i64"));
  CHECK_THROWS_WITH(reciprocal(whole), Catch::Contains("reciprocal: the tensor is i64"));
  CHECK_THROWS_WITH(whole > 0.5, Catch::Contains("0.5 is no whole number"));
  CHECK_THROWS_WITH(clamp(whole, {}, {}), Catch::Contains("clamp: neither"));
  CHECK_THROWS_WITH(topk(whole, 4), Catch::Contains("topk: k is 4, expected 0 to 3"));
  CHECK_THROWS_WITH(flatten(x, 1, 0), Catch::Contains("flatten: dimension 1 lies behind 0"));
  CHECK_THROWS_WITH(pad(whole, {-2, -2}), Catch::Contains("pad: widths -2 and -2"));
  CHECK_THROWS_WITH(tril(whole), Catch::Contains("no rows and columns"));
  CHECK_THROWS_WITH(diag(Tensor::zeros({}, f32, device)), Catch::Contains("diag: []"));
  CHECK_THROWS_WITH(outer(x, x), Catch::Contains("expected two vectors"));
  CHECK_THROWS_WITH(select(whole, 0, 3), Catch::Contains("select: position 3"));
  CHECK_THROWS_WITH(chunk(whole, 0), Catch::Contains("chunk: 0 pieces"));
}
