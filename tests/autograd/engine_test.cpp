// The backward pass: the order of its nodes, how gradients add up, regions, and what waits for its
// end.
#include "tessera/device/device_context.hpp"
#include "tests/autograd/graphs.hpp"

using namespace tessera;
using namespace tessera::testing;
using autograd::Gradients;
using autograd::record;
using autograd::RegionGuard;

TEST_CASE("nodes run in the reverse of the order in which they were made, each once") {
  const Device device = any_device();
  Log log;
  const Tensor x = leaf({1}, device);
  const Tensor a = logged(x, "a", log), b = logged(a, "b", log), c = logged(a, "c", log),
               d = logged(b + c, "d", log);
  logged(a, "unreached", log);
  d.backward();
  CHECK(log == Log{"d", "c", "b", "a"});
  CHECK(values(x.grad()) == std::vector<float>{2});
}

TEST_CASE("an operation that gives its input back leaves the input's history as it is") {
  const Device device = any_device();
  Tensor x = leaf({1, 2}, device);
  const Tensor y = x * 3.0;
  for (const Tensor& input : {x, y}) {
    const Tensor same = autograd::record(
        "probe", {input}, input,
        [](const Tensor& g, autograd::Gradients& out) { out.set(0, raw::mul(g, 2)); });
    sum(same).backward();
  }
  CHECK(values(x.grad()) == std::vector<float>{8, 8});  // 2, and 2 * 3
  sum(x).backward();
  CHECK(values(x.grad()) == std::vector<float>{9, 9});
}

TEST_CASE("gradients of several uses add up, and further passes add to them") {
  const Device device = any_device();
  Tensor x = leaf({1, 2, 3}, device);
  const auto pass = [&] { sum(x * x + x * 2.0 + x).backward(); };  // 2x + 3
  pass();
  CHECK(values(x.grad()) == std::vector<float>{5, 7, 9});
  pass();
  CHECK(values(x.grad()) == std::vector<float>{10, 14, 18});
  x.zero_grad();
  CHECK_FALSE(x.grad().defined());
  pass();
  CHECK(values(x.grad()) == std::vector<float>{5, 7, 9});
}

TEST_CASE("a hook on a tensor is given its gradient once, as a whole, and may change it") {
  const Device device = any_device();
  std::vector<std::vector<float>> seen;
  const auto gradient_of_x = [&](double factor) {
    const Tensor x = leaf({1, 2}, device);
    const Tensor y = on_gradient(x * 3.0, [&seen, factor](const Tensor& g) {
      seen.push_back(values(g));
      return factor == 1 ? Tensor{} : raw::mul(g, factor);  // undefined: as it is
    });
    CHECK(values(y) == std::vector<float>{3, 6});
    sum(y * y).backward();  // two uses: 2y comes to the hook
    return values(x.grad());
  };
  CHECK(gradient_of_x(1) == std::vector<float>{18, 36});
  CHECK(gradient_of_x(10) == std::vector<float>{180, 360});
  CHECK(seen == std::vector<std::vector<float>>{{6, 12}, {6, 12}});
}

TEST_CASE("a gradient handed to two inputs is never added into") {
  // `add` gives one tensor to both of its inputs. The left one gets a second contribution, which
  // must not show on the right.
  const Device device = any_device();
  const Tensor x = leaf({1, 1}, device), y = leaf({1, 1}, device);
  const Tensor left = x * 1.0, right = y * 1.0;
  const Tensor both = left + right;
  const Tensor later = left * 10.0;  // runs first, then `both` adds to what left holds
  const Tensor tail = left * 100.0;
  sum(both + later + tail).backward();
  CHECK(values(x.grad()) == std::vector<float>{111, 111});
  CHECK(values(y.grad()) == std::vector<float>{1, 1});
}

TEST_CASE("a gradient that arrives shared first is not added into afterwards") {
  const Device device = any_device();
  const Tensor x = leaf({1, 1}, device), y = leaf({1, 1}, device);
  const Tensor left = x * 1.0, right = y * 1.0;
  const Tensor early = left * 10.0;  // made before `both`, so it runs after it
  const Tensor both = left + right;
  const Tensor start = both + early;
  const Tensor given = Tensor::from({1, 2}, {2}, device);
  start.backward(given);
  CHECK(values(x.grad()) == std::vector<float>{11, 22});
  CHECK(values(y.grad()) == std::vector<float>{1, 2});
  CHECK(values(given) == std::vector<float>{1, 2});  // nor is the caller's own tensor
}

TEST_CASE("a gradient that nobody else sees is added to in place") {
  struct Names final : Observer {
    void launched(StreamId, Tick, const Op& op) override { seen.push_back(op.name); }
    Log seen;
  } names;
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = leaf({1, 2}, device);
  const Tensor y = x * 1.0;
  const Tensor total = y * 2.0 + y * 3.0 + y * 4.0;
  device.context().add_observer(names);
  total.backward(Tensor::ones({2}, f32, device));
  device.context().remove_observer(names);
  // Three products arrive at y, of which two are added to the first; then comes y's own, and x.
  CHECK(names.seen == Log{"fill", "mul", "mul", "axpby", "mul", "axpby", "mul", "axpby"});
  CHECK(values(x.grad()) == std::vector<float>{9, 9});
}

TEST_CASE("a leaf's gradient has the leaf's dtype and is contiguous") {
  const Device device = any_device();
  Tensor x = raw::transpose(Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}, device), 0, 1);
  x.require_grad();
  sum(x * x).backward();
  CHECK(x.grad().is_contiguous());
  CHECK(x.grad().shape() == Shape{3, 2});
  CHECK(values(x.grad()) == std::vector<float>{2, 8, 4, 10, 6, 12});
}

TEST_CASE("regions begin once and end once, also when they nest and interleave") {
  const Device device = any_device();
  Log log;
  const auto outer = std::make_shared<LoggedRegion>("outer", log);
  const auto inner = std::make_shared<LoggedRegion>("inner", log);
  const auto idle = std::make_shared<LoggedRegion>("idle", log);
  const Tensor x = leaf({1}, device);
  Tensor y;
  {
    const RegionGuard in_outer(outer);
    y = logged(x, "o1", log);
    {
      const RegionGuard in_inner(inner);
      y = logged(logged(y, "i1", log), "i2", log);
    }
    y = logged(y, "o2", log);
    const RegionGuard in_idle(idle);
    logged(y, "unreached", log);
  }
  logged(y, "after", log).backward();
  CHECK(log == Log{"after", "begin outer", "begin idle", "end idle", "o2", "begin inner", "i2",
                   "i1", "end inner", "o1", "end outer"});
}

TEST_CASE("a gradient for an input that an operation lacks is an error with its number") {
  const Tensor x = leaf({2}, any_device());
  for (const int input : {-1, 1}) {
    const Tensor y = record("one", {x}, raw::mul(x, 1),
                            [&](const Tensor& g, Gradients& out) { out.set(input, g); });
    CHECK_THROWS_WITH(sum(y).backward(), Catch::Contains(concat("a gradient for input ", input,
                                                                " of an operation that has 1")));
  }
}

TEST_CASE("a region that no gradient reaches begins and ends in its turn") {
  const Device device = any_device();
  Log log;
  const Tensor x = leaf({1}, device);
  Tensor cut;
  {
    const RegionGuard guard(std::make_shared<LoggedRegion>("cut", log));
    cut = logged(x, "cut", log);
  }
  const Tensor stop = record("stop", {x, cut}, raw::mul(x, 1),
                             [](const Tensor& g, Gradients& out) { out.set(0, g); });
  stop.backward();
  CHECK(log == Log{"begin cut", "end cut"});
  CHECK(values(x.grad()) == std::vector<float>{1});
}

TEST_CASE("a region stays open over a pass nested in one of its nodes") {
  const Device device = any_device();
  Log log;
  const auto region = std::make_shared<LoggedRegion>("r", log);
  const Tensor x = leaf({1}, device);
  Tensor y;
  {
    const RegionGuard guard(region);
    y = logged(x, "first", log);
    y = record("nests", {y}, raw::mul(y, 1), [&](const Tensor& g, Gradients& out) {
      CHECK(autograd::in_backward());
      CHECK_FALSE(autograd::grad_enabled());
      const Tensor inner = leaf({1}, device);
      {
        const autograd::GradModeGuard history(true);
        logged(logged(inner, "n1", log), "n2", log).backward(g);
      }
      out.set(0, inner.grad());
    });
  }
  y.backward();
  CHECK(log == Log{"begin r", "n2", "n1", "first", "end r"});
  CHECK(values(x.grad()) == std::vector<float>{1});
}

TEST_CASE("what is left for the end of backward runs once, after the last node") {
  const Device device = any_device();
  Log log;
  const Tensor x = leaf({1}, device);
  const auto defer = [&](const Tensor& t, const char* name) {
    return record(name, {t}, raw::mul(t, 1), [&, name](const Tensor& g, Gradients& out) {
      autograd::at_end_of_backward([&, name] {
        log.push_back(std::string("end of ") + name);
        if (std::string(name) == "b") autograd::at_end_of_backward([&] { log.push_back("last"); });
      });
      const Tensor inner = leaf({1}, device);
      {
        const autograd::GradModeGuard history(true);
        logged(inner, "nested", log).backward(g);
      }
      out.set(0, g);
    });
  };
  defer(logged(defer(x, "a"), "middle", log), "b").backward();
  CHECK(log == Log{"nested", "middle", "nested", "end of b", "end of a", "last"});
  CHECK_FALSE(autograd::in_backward());
  CHECK_THROWS_WITH(autograd::at_end_of_backward([] {}),
                    Catch::Contains("no backward pass is running"));
}
