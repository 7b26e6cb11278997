// A linear layer, a head and an embedding whose weights are stored in 8 bits beside PyTorch's of
// the same dequantised weight, as tests/golden/make_rows_in_8_bits.py has it: codes and scales to
// the bit, products within 1e-5, where a sum has 12 terms below 1.
#include "tessera/autograd/rows_in_8_bits.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/linear.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;

namespace {

constexpr std::int64_t kRows = 5, kIn = 12, kOut = 7;

template <class F>
Tensor filled(const Shape& shape, const Device& device, const F& f) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(static_cast<float>(f(static_cast<double>(i))));
  return Tensor::from(values, shape, device);
}

void check_near(const Tensor& found, const std::vector<double>& expected) {
  const std::vector<float> values = found.to_vector<float>();
  REQUIRE(values.size() == expected.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    CHECK(std::abs(static_cast<double>(values[i]) - expected[i]) < 1e-5);
}

}  // namespace

TEST_CASE("a layer stored in 8 bits has PyTorch's codes, products and derivative") {
  std::ifstream file(std::string(GOLDEN_FOLDER) + "/rows_in_8_bits.json");
  REQUIRE(file);
  const json golden = json::parse(file);
  const Device device = Device::cpu();
  Tensor x = filled({kRows, kIn}, device, [](double i) { return std::sin(1 + 0.7 * i); });
  x.require_grad();
  const auto [codes, scales] = encode_rows(filled({kOut, kIn}, device, [](double i) {
    return 0.05 * std::cos(0.3 * i) * std::pow(1.7, std::fmod(i, 5) - 2);
  }));
  std::vector<std::uint8_t> bytes(kOut * kIn);
  codes.to_bytes(std::as_writable_bytes(std::span(bytes)));
  CHECK(bytes == golden["codes"].get<std::vector<std::uint8_t>>());
  CHECK(scales.to_vector<float>() == golden["scales"].get<std::vector<float>>());
  const Tensor y = linear_in_8_bits(x, codes, scales, {});
  check_near(y, golden["y"]);
  y.backward(filled({kRows, kOut}, device, [](double i) { return std::cos(2 + 1.1 * i); }));
  check_near(x.grad(), golden["dx"]);

  const auto ids = [&](int step) {
    std::vector<std::int32_t> of;
    for (int i = 0; i < kRows; ++i) of.push_back(step * i % kOut);
    return Tensor::from(of, {kRows}, device);
  };
  nn::Linear head(kIn, kOut, {.bias = false, .is_streamed = true});
  head.store_in_8_bits();
  nn::init(head, {1}, device);
  head.load({{"weight", codes}, {"weight_scale", scales}});
  Tensor in = x.detach();
  in.require_grad();
  check_near(head(in), golden["y"]);
  const Tensor loss = head.product.cross_entropy(in, ids(3), 2);  // of at most two logits at a time
  check_near(raw::reshape(loss, {1}), golden["loss"]);
  loss.backward();
  check_near(in.grad(), golden["head_dx"]);

  nn::Embedding table(kOut, kIn);
  table.store_in_8_bits();
  nn::init(table, {1}, device);
  table.load({{"weight", codes}, {"weight_scale", scales}});
  check_near(table(ids(5)), golden["looked_up"]);
  check_near(table(raw::reshape(ids(5), {1, kRows, 1})), golden["looked_up"]);
  const std::vector<float> none = table(Tensor::full({1}, kOut, i32, device)).to_vector<float>();
  CHECK(none.size() == kIn);
  CHECK(std::ranges::all_of(none, [](float v) { return std::isnan(v); }));
  const Tensor x_TC = Tensor::zeros({2, 3, kIn}, f32, device);
  CHECK(table.add_positions(x_TC).to_vector<float>().size() == 2 * 3 * kIn);
}
