// Matrices after five steps of Muon as tests/golden/make_muon.py takes them with torch.optim.Muon.
//
// Tolerance. The file has PyTorch's steps in f64, f32 and bf16, so it says how far rounding takes
// them: largest |f32 - f64| and |bf16 - f64| of a case. Ours rounds as often, at other places; 8
// times that much, and four roundings of a parameter of at most 2 for what is the same in f64.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/optim/muon.hpp"
#include "tests/parity/largest_difference.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;
using tessera::testing::largest_difference;

namespace {

struct OneMatrix : nn::Module {
  explicit OneMatrix(const Shape& shape) : matrix(shape, Initializer::constant(0)) {
    register_parameter("matrix", matrix);
  }
  Parameter matrix;
};

template <class F>
Tensor matrix_of(const Shape& shape, const Device& device, const F& f) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(static_cast<float>(f(static_cast<double>(i))));
  return Tensor::from(values, shape, device);
}

}  // namespace

TEST_CASE("five steps of Muon are those of torch.optim.Muon") {
  std::ifstream file(std::string(GOLDEN_FOLDER) + "/muon.json");
  REQUIRE(file);
  const json cases = json::parse(file);
  REQUIRE(cases.size() == 12);
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  for (const json& c : cases)
    for (const DType dtype : {f32, bf16}) {
      INFO(c["shape"] << " ns_steps " << c["ns_steps"] << " in " << concat(dtype));
      const Shape shape{c["shape"][0].get<std::int64_t>(), c["shape"][1].get<std::int64_t>()};
      OneMatrix model(shape);
      nn::init(model, {0}, device);
      model.matrix.assign(matrix_of(shape, device, [](double i) { return std::sin(1 + 0.7 * i); }));
      optim::Muon muon(
          {model.matrix}, {},
          {.lr = c["lr"],
           .momentum = c["momentum"],
           .nesterov = c["nesterov"],
           .weight_decay = c["weight_decay"],
           .ns_steps = c["ns_steps"],
           .ns_dtype = dtype,
           .adjust_lr = c["adjust_lr_fn"] == "original" ? optim::MuonRate::original
                                                        : optim::MuonRate::match_rms_adamw});
      for (int t = 0; t < 5; ++t) {
        const Tensor gradient =
            matrix_of(shape, device, [t](double i) { return std::cos(t + 1.3 * i + 0.1 * i * t); });
        sum(model.matrix.value() * gradient).backward();
        muon.step();
        muon.zero_grad();
      }
      const std::vector<float> ours = model.matrix.shard().to_vector<float>();
      const std::vector<double> exact = c["f64"], rounded = c[dtype == f32 ? "f32" : "bf16"];
      CHECK(largest_difference({ours.begin(), ours.end()}, exact) <=
            8 * largest_difference(rounded, exact) + 4 * 2 * 0x1p-24);
    }
}
