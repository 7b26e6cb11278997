// Modules and functions in a row, and what a model is set up with.
#include "tessera/nn/sequential.hpp"

#include "tessera/autograd/elementwise.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/autograd/reductions.hpp"
#include "tessera/nn/dropout.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

const Device& device() {
  static const Device cpu = Device::cpu({.executor = ExecutorKind::inlined});
  return cpu;
}

struct Pair : nn::Module {
  Pair() { register_modules("up", up, "down", down); }
  nn::Linear up{3, 5}, down{5, 2};
};

}  // namespace

TEST_CASE("a sequence computes what its parts do in a row, and names them by position", "[nn]") {
  nn::Sequential model(
      std::make_unique<nn::Linear>(3, 5), relu, std::make_unique<nn::Dropout>(0.5),
      [](const Tensor& x) { return x * 2; }, std::make_unique<nn::Linear>(5, 2));
  CHECK(model.size() == 5);
  nn::init(model, {7}, device());
  model.eval();
  std::vector<std::string> names;
  for (const auto& [name, p] : model.named_parameters()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"0.weight", "0.bias", "4.weight", "4.bias"});

  const auto p = model.parameters();
  const Tensor x = Tensor::normal({4, 3}, 0, 1, 11, f32, device());
  const Tensor expected =
      linear(relu(linear(x, p[0].value(), p[1].value())) * 2, p[2].value(), p[3].value());
  CHECK(model(x).to_vector<float>() == expected.to_vector<float>());
}

TEST_CASE("a sequence is recomputed as it stands, and refuses a part that is not there", "[nn]") {
  nn::Sequential model(std::make_unique<nn::Linear>(3, 5), relu);
  nn::init(model, {7}, device());
  const Tensor x = Tensor::normal({4, 3}, 0, 1, 11, f32, device());
  optim::SGD optimizer(model.parameters(), {.lr = 1});
  const auto gradient_of = [&](const Tensor& y) {
    sum(y * y).backward();
    std::vector<float> gradient = model.parameters()[0].grad().to_vector<float>();
    optimizer.zero_grad();
    return gradient;
  };
  const std::vector<float> expected = gradient_of(model(x));
  CHECK(gradient_of(recompute(model, x)) == expected);
  CHECK_THROWS_WITH(model.push_back(std::unique_ptr<nn::Linear>()),
                    "Sequential: part 2 is null; give a module");
}

TEST_CASE("several modules are registered in one call", "[nn]") {
  Pair pair;
  std::vector<std::string> names;
  for (const auto& [name, p] : pair.named_parameters()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"up.weight", "up.bias", "down.weight", "down.bias"});
}

TEST_CASE("a parameter that no module has says so when it is used", "[nn]") {
  nn::Linear layer(3, 5);
  const Tensor x = Tensor::zeros({4, 3}, f32, device());
  CHECK_THROWS_WITH(layer(x), Catch::Matchers::Contains("register it and its module"));
}
