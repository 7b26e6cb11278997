// Values and momentum after five steps of SGD as tests/golden/make_sgd.py takes them with
// torch.optim.SGD.
//
// Tolerance. The file has PyTorch's steps in f64 and f32, so it says how far rounding takes them.
// Ours rounds as often, at other places; 8 times that much, and four roundings of a value of at
// most 8 for what is the same in f64.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/parity/largest_difference.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;
using tessera::testing::largest_difference;

namespace {

constexpr std::int64_t kCount = 11;

struct OneVector : nn::Module {
  OneVector() : values({kCount}, Initializer::constant(0)) { register_parameter("values", values); }
  Parameter values;
};

template <class F>
Tensor vector_of(const Device& device, const F& f) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < kCount; ++i)
    values.push_back(static_cast<float>(f(static_cast<double>(i))));
  return Tensor::from(values, {kCount}, device);
}

}  // namespace

TEST_CASE("five steps of SGD are those of torch.optim.SGD") {
  std::ifstream file(std::string(GOLDEN_FOLDER) + "/sgd.json");
  REQUIRE(file);
  const json cases = json::parse(file);
  REQUIRE(cases.size() == 10);
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  for (const json& c : cases) {
    const optim::SGDOptions options{.lr = c["lr"],
                                    .momentum = c["momentum"],
                                    .dampening = c["dampening"],
                                    .weight_decay = c["weight_decay"],
                                    .nesterov = c["nesterov"]};
    INFO("momentum " << options.momentum << ", dampening " << options.dampening << ", nesterov "
                     << options.nesterov << ", weight_decay " << options.weight_decay);
    OneVector model;
    nn::init(model, {0}, device);
    model.values.assign(vector_of(device, [](double i) { return std::sin(1 + 0.7 * i); }));
    optim::SGD sgd({model.values}, options);
    for (int t = 0; t < 5; ++t) {
      const Tensor gradient =
          vector_of(device, [t](double i) { return std::cos(t + 1.3 * i + 0.1 * i * t); });
      sum(model.values.value() * gradient).backward();
      sgd.step();
      sgd.zero_grad();
    }
    std::vector<Tensor> found = sgd.moments(model.values);
    found.insert(found.begin(), model.values.shard());
    REQUIRE(found.size() == c["f64"].size());
    for (std::size_t k = 0; k < found.size(); ++k) {
      const std::vector<float> ours = found[k].to_vector<float>();
      const std::vector<double> exact = c["f64"][k], rounded = c["f32"][k];
      CHECK(largest_difference({ours.begin(), ours.end()}, exact) <=
            8 * largest_difference(rounded, exact) + 4 * 8 * 0x1p-24);
    }
  }
}
