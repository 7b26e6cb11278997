// Parameters after five steps of Adafactor, an optimizer written from public headers, as
// tests/golden/make_adafactor.py takes them with torch.optim.Adafactor.
//
// Tolerance. The file has PyTorch's steps in f64 and in f32, so it says how far rounding takes
// them: the largest |f32 - f64| of a case. Ours rounds as often, at other places; 8 times that
// much, and four roundings of the largest value for what is the same in f64.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"
#include "tests/support/adafactor.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;
using nlohmann::json;

namespace {

struct OneParameter : nn::Module {
  explicit OneParameter(const Shape& shape) : p(shape, Initializer::constant(0)) {
    register_parameter("p", p);
  }
  Parameter p;
};

template <class F>
Tensor tensor_of(const Shape& shape, const Device& device, const F& f) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(static_cast<float>(f(static_cast<double>(i))));
  return Tensor::from(values, shape, device);
}

void check_near(const std::vector<float>& ours, const std::vector<double>& exact,
                const std::vector<double>& rounded) {
  REQUIRE(ours.size() == exact.size());
  double bound = 0, largest = 0, worst = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    bound = std::max(bound, std::abs(rounded[i] - exact[i]));
    largest = std::max(largest, std::abs(exact[i]));
    worst = std::max(worst, std::abs(static_cast<double>(ours[i]) - exact[i]));
  }
  CHECK(worst <= 8 * bound + 4 * largest * 0x1p-24);
}

}  // namespace

TEST_CASE("five steps of Adafactor, and its state, are those of torch.optim.Adafactor") {
  std::ifstream file(std::string(GOLDEN_FOLDER) + "/adafactor.json");
  REQUIRE(file);
  const json cases = json::parse(file);
  REQUIRE(cases.size() == 8);
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  for (const json& c : cases) {
    const std::vector<std::int64_t> sizes = c["shape"];
    const Shape shape{std::span<const std::int64_t>(sizes)};
    OneParameter model(shape);
    nn::init(model, {0}, device);
    model.p.assign(tensor_of(shape, device, [](double i) { return std::sin(1 + 0.7 * i); }));
    Adafactor adafactor({model.p}, {.lr = c["lr"],
                                    .beta2_decay = c["beta2_decay"],
                                    .eps2 = c["eps2"],
                                    .d = c["d"],
                                    .weight_decay = c["weight_decay"]});
    for (int t = 0; t < 5; ++t) {
      const Tensor gradient =
          tensor_of(shape, device, [t](double i) { return std::cos(t + 1.3 * i + 0.1 * i * t); });
      sum(model.p.value() * gradient).backward();
      adafactor.step();
      adafactor.zero_grad();
    }
    for (const auto& [name, exact] : c["f64"].items()) {
      INFO(shape << " lr " << c["lr"] << ": " << name);
      const Tensor ours = name == "p" ? model.p.shard() : adafactor.state(model.p, name);
      check_near(raw::contiguous(ours).to_vector<float>(), exact, c["f32"][name]);
    }
  }
}
