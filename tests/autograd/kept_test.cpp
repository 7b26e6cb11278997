// What a graph keeps for backward: for how long, who may run it again, and what gradients
// overwrite.
#include <set>
#include <string_view>
#include <tuple>

#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/autograd/graphs.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;

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

  // One tensor of both: two halves and the result's gradient, and two halves more.
  const Tensor both = leaf({-1, 0.5, 2, 4, -2, 0.25}, device);
  const auto touched_by_one = [&](bool keeps) {
    const auto bytes = std::make_shared<Bytes>();
    device.context().add_observer(bytes);
    Tensor gate_up = mul(both, 2);
    const std::vector<float> before = values(gate_up);
    const Tensor loss = sum(swiglu(gate_up));
    if (!keeps) gate_up = {};
    loss.backward();
    if (keeps) CHECK(values(gate_up) == before);
    device.context().remove_observer(*bytes);
    return bytes->begins.size();
  };
  CHECK(touched_by_one(false) == 3);
  CHECK(touched_by_one(true) == 5);
}

TEST_CASE("cross_entropy writes its gradient over logits that nobody else holds") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger& ledger = Memory::of(device).ledger();
  const std::int64_t rows = 64, vocab = 64, bytes = rows * vocab * 4;
  Tensor x = Tensor::normal({1, vocab}, 0, 1, fresh_seed(), f32, device);
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

TEST_CASE("a leaf hears when nothing more comes, in every pass") {
  struct Heard final : autograd::Leaf {
    explicit Heard(const Device& device) : sum(Tensor::zeros({2}, f32, device)) {}
    autograd::GradientSink sink() override { return {sum, 1, contributions++ > 0}; }
    const Shape& gradient_shape() const override { return sum.shape(); }
    Tensor gradient() const override { return sum; }
    void clear() override {}
    void on_last_contribution() override { heard.push_back(contributions); }
    Tensor sum;
    int contributions = 0;
    std::vector<int> heard;  // after how many contributions
  };
  const Device device = Device::cpu();
  const auto heard = std::make_shared<Heard>(device);
  const auto use = [&] {  // as a parameter's value
    Tensor x = Tensor::ones({2}, f32, device);
    autograd::note_use(heard);
    x.history() = {nullptr, heard};
    return x;
  };
  const Tensor x = leaf({1, 2}, device);
  SECTION("two uses") {
    sum(use() * x + use()).backward();
    CHECK(heard->heard == std::vector{2});
  }
  SECTION("a graph that is kept") {
    const Tensor y = sum(use() * x * use());
    y.backward({}, true);
    y.backward();
    CHECK(heard->heard == std::vector{2, 4});
  }
  SECTION("a use in a recomputed function, and one before or behind it") {
    const auto f = [&](const Tensor& h) { return h * use(); };
    sum(recompute(f, x * use()) * use()).backward();
    CHECK(heard->heard.front() == 3);
    CHECK(heard->contributions == 3);
  }
  SECTION("recomputed functions within one another") {
    const auto inner = [&](const Tensor& h) { return h * use(); };
    const auto outer = [&](const Tensor& h) {
      return recompute(inner, recompute(inner, h) * use());
    };
    sum(recompute(outer, x)).backward();
    CHECK(heard->heard.front() == 3);
    CHECK(heard->contributions == 3);
  }
  SECTION("a use that backward does not reach") {
    const Tensor unused = sum(use());
    sum(use() * x).backward();
    CHECK(heard->heard == std::vector{1});
  }
}
