// The backward pass: order, accumulation, regions, what is kept and what is freed.
#include <memory>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using autograd::Gradients;
using autograd::record;
using autograd::Region;
using autograd::RegionGuard;
using autograd::Saved;
using Log = std::vector<std::string>;
using tessera::testing::any_device;

namespace {

Tensor leaf(const std::vector<float>& values, const Device& device) {
  Tensor x = Tensor::from(values, {static_cast<std::int64_t>(values.size())}, device);
  return x.require_grad();
}

std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

// Identity that writes its name when its backward runs.
Tensor logged(const Tensor& x, const char* name, Log& log) {
  return record(name, {x}, raw::mul(x, 1), [name, &log](const Tensor& g, Gradients& out) {
    log.push_back(name);
    out.set(0, g);
  });
}

struct LoggedRegion final : Region {
  LoggedRegion(std::string name, Log& log) : name(std::move(name)), log(log) {}
  void on_backward_begin() override { log.push_back("begin " + name); }
  void on_backward_end() override { log.push_back("end " + name); }
  std::string name;
  Log& log;
};

}  // namespace

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

TEST_CASE(
    "a tensor that backward needs and somebody has written is an error that names the writer") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2}, device), y = x * 3.0, loss = sum(y * y);
  raw::fill(y.detach(), 5);
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("written by 'fill'"));
  const Tensor again = x * 3.0;
  raw::fill(again.detach(), 5);  // before it is saved
  sum(again * again).backward();
  CHECK(values(x.grad()) == std::vector<float>{30, 30});
}

TEST_CASE("a graph that is retained runs again, with what it saved, until it is freed") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2}, device);
  Log log;
  const Tensor trunk = logged(x * x, "trunk", log);
  const Tensor a = sum(logged(trunk, "a", log)), b = sum(logged(trunk * 3.0, "b", log));
  a.backward({}, true);
  CHECK(values(x.grad()) == std::vector<float>{2, 4});
  a.backward({}, true);
  CHECK(values(x.grad()) == std::vector<float>{4, 8});
  b.backward();
  CHECK(values(x.grad()) == std::vector<float>{10, 20});
  CHECK(log == Log{"a", "trunk", "a", "trunk", "b", "trunk"});
  CHECK_THROWS_WITH(a.backward(), Catch::Contains("'trunk' has already run and was freed"));
}

TEST_CASE("what operations save outlives a backward that retains the graph") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, device);
  const Tensor targets = Tensor::from(std::vector<std::int32_t>{2, 0}, {2}, device);
  const Tensor loss = cross_entropy(reshape(x * 1.0, {2, 3}), targets);
  loss.backward({}, true);
  const std::vector<float> once = values(x.grad());
  loss.backward();
  for (std::size_t i = 0; i < once.size(); ++i) CHECK(values(x.grad())[i] == 2 * once[i]);
}

TEST_CASE("a graph runs once, and a second pass over it is refused by name") {
  const Device device = any_device();
  const Tensor x = leaf({1, 2}, device);
  const Tensor shared = x * x;
  const Tensor a = sum(shared), b = sum(shared * 2.0);
  a.backward();
  CHECK_THROWS_WITH(a.backward(), Catch::Contains("'sum' has already run and was freed"));
  CHECK_THROWS_WITH(b.backward(), Catch::Contains("'mul' has already run and was freed"));
  CHECK(values(x.grad()) == std::vector<float>{2, 4});
  // The refusals left nothing behind: passes run and end as before.
  CHECK_FALSE(autograd::in_backward());
  bool ended = false;
  record("probe", {x}, raw::mul(x, 1), [&](const Tensor&, Gradients&) {
    autograd::at_end_of_backward([&] { ended = true; });
  }).backward(Tensor::ones({2}, f32, device));
  CHECK(ended);
}

TEST_CASE("a pass frees what its nodes kept, as it goes") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger& ledger = Memory::of(device).ledger();
  const Tensor x = Tensor::zeros({1000}, f64, device).require_grad();
  const std::int64_t before = ledger.live_bytes();
  Tensor y = x;
  for (int i = 0; i < 10; ++i) y = tanh(y);
  CHECK(ledger.live_bytes() == before + 10 * 8192);
  ledger.reset_peak();
  y.backward(Tensor::zeros({1000}, f64, device));
  // Besides x and its gradient only y itself is left.
  CHECK(ledger.live_bytes() == before + 2 * 8192);
  // At the height, in the second node: ten results (y is the caller's), the gradient that was
  // given, the node's own and the one in the making.
  CHECK(ledger.peak_bytes() == before + 13 * 8192);
}

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

TEST_CASE("Saved counts the holders of a storage") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  const int& count = x.storage()->saved;
  {
    const Saved a(x);
    CHECK(count == 1);
    CHECK_FALSE(a.get().requires_grad());
    Saved b(raw::transpose(x, 0, 1));
    CHECK(count == 2);
    CHECK(b.get().shape() == Shape{3, 2});
    const Saved c(b);  // NOLINT: the copy is what is tested
    CHECK(count == 3);
    const Saved moved = std::move(b);
    CHECK(count == 3);
    b = a;
    CHECK(count == 4);
    const Saved nothing{Tensor()};
    CHECK_FALSE(nothing.get().defined());
  }
  CHECK(count == 0);

  Tensor w = Tensor::ones({3}, f32, device).require_grad();
  const Tensor y = w * x;
  CHECK(w.storage()->saved == 1);
  CHECK(x.storage()->saved == 1);
  sum(y).backward();
  CHECK(w.storage()->saved == 0);
  CHECK(x.storage()->saved == 0);
}

TEST_CASE("swiglu's gradients lie where gate and up did, unless somebody holds them") {
  struct Bytes final : Observer {  // that the derivative touches
    void launched(StreamId, Tick, const Op& op) override {
      if (std::string_view(op.name) != "swiglu_backward") return;
      for (const Access& access : op.accesses) begins.insert(access.begin);
    }
    std::set<const void*> begins;
  };
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = leaf({-1, 0.5, 2}, device), z = leaf({3, -2, 0.25}, device);
  const auto run = [&](bool keeps_gate, bool retains) {
    const auto bytes = std::make_shared<Bytes>();
    device.context().add_observer(bytes);
    Tensor gate = mul(x, 2), up = mul(z, 3);
    const std::vector<float> before = values(gate);
    const Tensor loss = sum(swiglu(gate, up));
    up = {};
    if (!keeps_gate) gate = {};
    for (int pass = 0; pass <= (retains ? 1 : 0); ++pass) {
      Tensor(x).zero_grad(), Tensor(z).zero_grad();
      loss.backward({}, retains && pass == 0);
    }
    if (keeps_gate) CHECK(values(gate) == before);
    device.context().remove_observer(*bytes);
    return std::tuple(bytes->begins.size(), values(x.grad()), values(z.grad()));
  };
  const auto [touched, dx, dz] = run(false, false);
  CHECK(touched == 3);  // gate, up and the result's gradient
  CHECK(run(true, false) == std::tuple(4, dx, dz));
  const auto again = run(false, true);
  CHECK(std::get<0>(again) > 3);
  CHECK(std::get<1>(again) == dx);
  CHECK(std::get<2>(again) == dz);
}

TEST_CASE("cross_entropy writes its gradient over logits that nobody else holds") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger& ledger = Memory::of(device).ledger();
  const std::int64_t rows = 64, vocab = 64, bytes = rows * vocab * 4;
  Tensor x = Tensor::normal({1, vocab}, 0, 1, std::random_device{}(), f32, device);
  x.require_grad();
  const Tensor targets = Tensor::arange(rows, i64, device);
  const auto run = [&](bool keep) {
    x.zero_grad();
    Tensor logits = expand(x, {rows, vocab}) + 0.0;
    const std::vector<float> before = logits.to_vector<float>();
    const Tensor loss = cross_entropy(logits, targets);
    if (!keep) logits = {};
    const std::int64_t held = ledger.live_bytes();
    ledger.reset_peak();
    loss.backward();
    if (keep) CHECK(logits.to_vector<float>() == before);  // untouched
    return std::pair(ledger.peak_bytes() - held, x.grad().to_vector<float>());
  };
  const auto [peak_reused, reused] = run(false);
  const auto [peak_shared, shared] = run(true);
  CHECK(reused == shared);
  CHECK(peak_reused < bytes / 2);  // only small things, among them the gradient of x
  CHECK(peak_shared >= bytes);
}
