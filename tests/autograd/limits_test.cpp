// The ends of a backward pass's range: no history, a leaf, what is refused, exceptions, and a chain
// as long as no stack is deep.
#include <stdexcept>

#include "tests/autograd/graphs.hpp"

using namespace tessera;
using namespace tessera::testing;
using autograd::Gradients;
using autograd::record;
using autograd::RegionGuard;

TEST_CASE("without gradients nothing is recorded") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2}, device);
  {
    const NoGradGuard guard;
    CHECK_FALSE(autograd::grad_enabled());
    CHECK_FALSE((x * x).requires_grad());
    {
      const autograd::GradModeGuard again(true);
      CHECK((x * x).requires_grad());
    }
    CHECK_FALSE((x * x).requires_grad());
  }
  CHECK((x * x).requires_grad());
  CHECK_FALSE((x.detach() * 2.0).requires_grad());
  CHECK_FALSE((x > x).requires_grad());
  CHECK_THROWS_WITH(sum(x.detach()).backward(), Catch::Contains("no history"));
}

TEST_CASE("backward and require_grad refuse what makes no sense") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2}, device);
  CHECK_THROWS_WITH((x * 2.0).backward(), Catch::Contains("[2]") && Catch::Contains("gradient"));
  CHECK_THROWS_WITH((x * 2.0).backward(Tensor::ones({3}, f32, device)), Catch::Contains("[3]"));
  CHECK_THROWS_WITH((x * 2.0).backward(Tensor::ones({2}, bf16, device)),
                    Catch::Contains("of bf16") && Catch::Contains("of f32"));
  CHECK_THROWS_WITH(Tensor::zeros({2}, i64, device).require_grad(), Catch::Contains("i64"));
  CHECK_THROWS_WITH((x * 2.0).require_grad(), Catch::Contains("detach it first"));
  CHECK_THROWS_AS(Tensor().backward(), ContractError);
  CHECK_FALSE(Tensor().requires_grad());
}

TEST_CASE("backward on a leaf is its own gradient") {
  const Device device = any_device();
  const Tensor x = leaf({5}, device);
  x.backward();
  x.backward(Tensor::full({1}, 2, f32, device));
  CHECK(values(x.grad()) == std::vector<float>{3});
}

TEST_CASE("an exception in a backward function leaves engine and regions usable") {
  const Device device = any_device();
  Log log;
  const auto region = std::make_shared<LoggedRegion>("r", log);
  const Tensor x = leaf({1}, device);
  bool fails = true;
  const auto build = [&] {
    const RegionGuard guard(region);
    Tensor y = logged(x, "first", log);
    y = record("fails", {y}, raw::mul(y, 1), [&](const Tensor& g, Gradients& out) {
      autograd::at_end_of_backward([&] { log.push_back("at end"); });
      if (fails) throw std::runtime_error("no luck");
      out.set(0, g);
    });
    return logged(y, "last", log);
  };
  const Tensor y = build();
  CHECK_THROWS_WITH(y.backward(), "no luck");
  CHECK(log == Log{"begin r", "last"});
  CHECK_FALSE(autograd::in_backward());
  CHECK(autograd::grad_enabled());
  CHECK_FALSE(x.grad().defined());
  CHECK_THROWS_AS(y.backward(), ContractError);  // half of it is gone

  fails = false;
  log.clear();
  build().backward();
  CHECK(log == Log{"begin r", "last", "first", "end r", "at end"});
  CHECK(values(x.grad()) == std::vector<float>{1});
}

TEST_CASE("a chain of 400,000 nodes runs and dies without deep recursion") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = leaf({1}, device);
  const bool run = GENERATE(true, false);
  Tensor y = x;
  for (int i = 0; i < 400000; ++i)
    y = record("pass", {y}, y.detach(), [](const Tensor& g, Gradients& out) { out.set(0, g); });
  if (run) {
    y.backward();
    CHECK(values(x.grad()) == std::vector<float>{1});
  }
  y = {};  // the whole chain dies here when nobody ran it
  CHECK(x.requires_grad());
}
