// Recomputation: the same gradients, bit by bit, from less memory.
#include "tessera/autograd/recompute.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/autograd/random.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::any_device;
using tessera::testing::bytes_of;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

// A small block with parameters, dropout and several uses of its input.
struct Mixer {
  Tensor up, down, scale;

  Mixer(std::uint64_t seed, DType dtype, const Device& device)
      : up(Tensor::normal({16, 8}, 0, 0.3, seed, dtype, device)),
        down(Tensor::normal({8, 16}, 0, 0.3, seed + 1, dtype, device)),
        scale(Tensor::normal({8}, 1, 0.1, seed + 2, dtype, device)) {
    for (Tensor* p : {&up, &down, &scale}) p->require_grad();
  }
  Tensor operator()(const Tensor& x) const {
    const Tensor normed = rms_norm(x, scale, 1e-5);
    const Tensor hidden = dropout(gelu(linear(normed, up)), 0.25, 7, 100);
    // The thread's own draws have to be the same again, too.
    const auto draw = static_cast<std::int64_t>(autograd::random_state().draws++);
    return x + dropout(linear(hidden, down), 0.25, 9, draw * 1000) + x * normed;
  }
};

}  // namespace

TEST_CASE("recompute gives the same values and gradients, bit by bit") {
  const Device device = any_device();
  const DType dtype = GENERATE(f32, f64, bf16);
  const std::uint64_t seed = testing::fresh_seed();
  INFO(dtype << ", seed " << seed);
  enum class How { plain, recomputed, nested };
  const auto run = [&](How how) {
    const autograd::RandomStateGuard random({.seed = seed, .draws = 3});
    const Mixer first(seed, dtype, device), second(seed + 10, dtype, device);
    Tensor x = Tensor::normal({6, 8}, 0, 1, seed + 20, dtype, device);
    x.require_grad();
    Tensor y = x * 1.0;
    if (how == How::plain) y = second(first(y));
    if (how == How::recomputed) y = recompute(second, recompute(first, y));
    if (how == How::nested)
      y = recompute([&](const Tensor& t) { return recompute(second, recompute(first, t)); }, y);
    const std::uint64_t draws = autograd::random_state().draws;
    sum(y * y).backward();
    CHECK(autograd::random_state().draws == draws);  // backward draws nothing of its own
    CHECK(draws == 5);
    std::vector<std::vector<std::byte>> out{bytes_of(y), bytes_of(x.grad())};
    for (const Mixer* b : {&first, &second})
      for (const Tensor* p : {&b->up, &b->down, &b->scale}) out.push_back(bytes_of(p->grad()));
    return out;
  };
  const auto expected = run(How::plain);
  CHECK(run(How::recomputed) == expected);
  CHECK(run(How::nested) == expected);
}

TEST_CASE("recompute lowers the peak of memory") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger& ledger = Memory::of(device).ledger();
  const auto peak = [&](bool recomputed) {
    std::vector<Mixer> blocks;
    for (std::uint64_t i = 0; i < 8; ++i) blocks.emplace_back(i, f32, device);
    Tensor y = Tensor::zeros({1024, 8}, f32, device);
    const std::int64_t before = ledger.live_bytes();
    ledger.reset_peak();
    for (const Mixer& b : blocks) y = recomputed ? recompute(b, y) : b(y);
    sum(y).backward();
    return ledger.peak_bytes() - before;
  };
  // Of each of 8 blocks only its input is kept, and what one block keeps exists once: well below
  // half of everything.
  CHECK(peak(true) * 2 < peak(false));
}

TEST_CASE("a function that runs again computes no further than what it saves") {
  struct Names final : Observer {
    void launched(StreamId, Tick, const Op& op) override { all.emplace_back(op.name); }
    std::vector<std::string> all;
  };
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Tensor x = Tensor::normal({6, 8}, 0, 1, 1, f32, device);
  Tensor w = Tensor::normal({8, 8}, 0, 1, 2, f32, device);
  x.require_grad(), w.require_grad();
  const auto names = std::make_shared<Names>();
  device.context().add_observer(names);
  const auto matmuls = [&](bool recomputed, const std::function<void(const Tensor&)>& look) {
    const auto f = [&](const Tensor& t) {
      const Tensor y = t + linear(tanh(t), w);
      look(y);
      return y;
    };
    const Tensor loss = sum(recomputed ? recompute(f, x) : f(x));
    names->all.clear();
    loss.backward();
    return std::ranges::count(names->all, "matmul");
  };
  const auto derivatives = matmuls(false, [](const Tensor&) {});  // of weight and input
  CHECK(derivatives == 2);
  CHECK(matmuls(true, [](const Tensor&) {}) == derivatives);

  // Whoever looks at the rest gets it: the host, and an operation that nothing is known of.
  std::vector<double> read;
  CHECK(matmuls(true, [&](const Tensor& y) { read.push_back(sum(y).item()); }) == derivatives + 1);
  REQUIRE(read.size() == 2);
  CHECK(read[0] == read[1]);
  std::vector<float> first;
  CHECK(matmuls(true, [&](const Tensor& y) {
          const Access access = y.access(AccessMode::read);
          device.compute().launch({.name = "own", .accesses = {&access, 1}},
                                  [to = &first, from = static_cast<const float*>(access.begin)](
                                      Exec&) { to->push_back(*from); });
        }) == derivatives + 1);
  REQUIRE(first.size() == 2);
  CHECK(first[0] == first[1]);

  // Or keeps it, to look at it later: the result itself, what is made of it, or a copy.
  const Tensor into = Tensor::zeros({6, 8}, f32, device);
  const std::function<Tensor(const Tensor&)> keeps[] = {
      [](const Tensor& y) { return y; }, [](const Tensor& y) { return y.detach(); },
      [](const Tensor& y) { return raw::mul(y, 2.0); },
      [&](const Tensor& y) {
        raw::copy_into(into, y);
        return into;
      }};
  for (const auto& keep : keeps) {
    std::vector<Tensor> kept;
    CHECK(matmuls(true, [&](const Tensor& y) { kept.push_back(keep(y)); }) == derivatives + 1);
    REQUIRE(kept.size() == 2);
    CHECK(kept[0].to_vector<float>() == kept[1].to_vector<float>());
  }
}

TEST_CASE("a recomputed function is checked against differences as any other") {
  Draw draw;
  INFO("seed " << draw.seed);
  check_gradients(
      [](const auto& v) {
        return recompute(
            [w = v[1]](const Tensor& x) {
              const auto f = [w](const Tensor& t) { return tanh(t * w) + t; };
              return recompute(f, f(x));
            },
            v[0]);
      },
      {draw.normal({3, 2}), draw.normal({2})});
}

TEST_CASE("parameters inside get gradients also when the input wants none") {
  const Device device = any_device();
  const Tensor x = Tensor::from({1, 2}, {2}, device);
  Tensor w = Tensor::from({3, 4}, {2}, device);
  w.require_grad();
  std::vector<bool> history;
  const Tensor y = recompute(
      [&](const Tensor& t) {
        history.push_back(autograd::grad_enabled());
        return t * w;
      },
      x);
  CHECK(y.requires_grad());
  y.backward(Tensor::ones({2}, f32, device));
  CHECK(w.grad().to_vector<float>() == std::vector<float>{1, 2});
  CHECK_FALSE(x.requires_grad());
  CHECK(history == std::vector<bool>{false, true});  // kept nothing forward

  const Tensor nothing = recompute([](const Tensor& t) { return t * 2.0; }, x);
  CHECK_NOTHROW(sum(nothing).backward());  // nothing is trainable, which is no error
}

TEST_CASE("functions that hand on their argument, a view of it or a parameter") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2}, {2}, device), w = Tensor::from({3, 4}, {2}, device);
  x.require_grad();
  w.require_grad();
  const Tensor g = Tensor::from({5, 6}, {2}, device);
  recompute([](const Tensor& t) { return t; }, x).backward(g);
  CHECK(x.grad().to_vector<float>() == std::vector<float>{5, 6});
  recompute([](const Tensor& t) { return reshape(t, {2, 1}); }, x)
      .backward(Tensor::ones({2, 1}, f32, device));
  CHECK(x.grad().to_vector<float>() == std::vector<float>{6, 7});
  recompute([&](const Tensor&) { return w; }, x).backward(g);
  CHECK(w.grad().to_vector<float>() == std::vector<float>{5, 6});
  CHECK(x.grad().to_vector<float>() == std::vector<float>{6, 7});
}

TEST_CASE("without gradients recompute is a call") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2}, {2}, device);
  x.require_grad();
  const NoGradGuard guard;
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensor& t) {
        ++calls;
        return t * 2.0;
      },
      x);
  CHECK_FALSE(y.requires_grad());
  CHECK(calls == 1);
}

TEST_CASE("an exception inside, forward or backward, passes through and leaves all as it was") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2}, {2}, device);
  x.require_grad();
  int calls = 0, fails_at = 1;
  const auto f = [&](const Tensor& t) {
    if (++calls == fails_at) throw std::runtime_error("no luck");
    autograd::random_state().draws += 10;
    return t * t;
  };
  const std::uint64_t draws = autograd::random_state().draws;
  CHECK_THROWS_WITH(recompute(f, x), "no luck");
  CHECK(autograd::grad_enabled());

  calls = 0;
  fails_at = 2;
  const Tensor y = recompute(f, x);
  CHECK_THROWS_WITH(sum(y).backward(), "no luck");
  CHECK(autograd::grad_enabled());
  CHECK_FALSE(autograd::in_backward());
  CHECK(autograd::random_state().draws == draws + 10);
  CHECK_FALSE(x.grad().defined());

  calls = 0;
  fails_at = 0;
  sum(recompute(f, x)).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{2, 4});
}

TEST_CASE("what recomputed functions capture gets its gradient as an input does, bit by bit") {
  const Device device = any_device();
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  enum class How { plain, recomputed, nested };
  const auto run = [&](How how, bool is_used_behind) {
    Tensor x = Tensor::normal({3, 4}, 0, 1, seed, f32, device), v = x.detach() * 0.5;
    x.require_grad(), v.require_grad();
    const Tensor condition = tanh(v * v);
    const auto f = [&](const Tensor& t) { return tanh(t * condition) + condition; };
    const auto both = [&](const Tensor& t) {
      const Tensor inner = t * 2.0;  // of this function, captured by the one within
      const auto g = [&f, inner](const Tensor& u) { return f(u) * inner; };
      return how == How::nested ? recompute(g, f(t)) : g(f(t));
    };
    Tensor y = x * 1.0;
    for (int block = 0; block < 2; ++block) y = how == How::plain ? both(y) : recompute(both, y);
    const auto hands_on = [&](const Tensor&) { return condition; };
    y = y * (how == How::plain ? hands_on(y) : recompute(hands_on, y));
    if (is_used_behind) y = y + condition;
    sum(y * y).backward();
    return std::vector{bytes_of(x.grad()), bytes_of(v.grad())};
  };
  for (const bool is_used_behind : {false, true}) {
    const auto expected = run(How::plain, is_used_behind);
    CHECK(run(How::recomputed, is_used_behind) == expected);
    CHECK(run(How::nested, is_used_behind) == expected);
  }
}

TEST_CASE("what a recomputed function has captured and somebody wrote since is told") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2}, {2}, device);
  x.require_grad();
  const Tensor outer = x * 3.0;
  const Tensor y = recompute([&](const Tensor& t) { return t * outer; }, x * 2.0);
  raw::fill(outer, 0);
  CHECK_THROWS_WITH(sum(y).backward(), Catch::Contains("was written by 'fill' since forward"));
  CHECK_FALSE(autograd::in_backward());
}

TEST_CASE("what a recomputed function uses without gradients is no input of it") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2}, {2}, device), v = Tensor::from({3, 4}, {2}, device);
  x.require_grad(), v.require_grad();
  const Tensor outer = v * v;
  const auto f = [&](const Tensor& t) {
    const NoGradGuard no_gradient;
    return outer * 2.0 + t.detach();
  };
  sum(recompute([&](const Tensor& t) { return t * f(t); }, x)).backward();
  CHECK(x.grad().defined());
  CHECK_FALSE(v.grad().defined());
}

TEST_CASE("a recomputed function has several results, whose gradients are those of the function") {
  const Device device = any_device();
  const DType dtype = GENERATE(f32, bf16);
  const std::uint64_t seed = testing::fresh_seed();
  INFO(dtype << ", seed " << seed);
  enum class How { plain, recomputed, nested };
  // Which results the loss is made of, 1 and 2 as bits; of 4 results the third is its argument, and
  // the last is not floating.
  const auto run = [&](How how, int used, const Keep& keep) {
    const autograd::RandomStateGuard random({.seed = seed, .draws = 3});
    const Mixer first(seed, dtype, device), second(seed + 10, dtype, device);
    Tensor x = Tensor::normal({6, 8}, 0, 1, seed + 20, dtype, device);
    x.require_grad();
    const Tensor shared = x * 3.0;  // captured
    int runs = 0;
    const auto f = [&](std::span<const Tensor> in) {
      ++runs;
      const Tensor h = first(in[0]),
                   y = how == How::nested ? recompute(second, h, keep) : second(h);
      return std::vector<Tensor>{y, sum(y * shared), in[0], Tensor::arange(4, i32, in[0].device())};
    };
    const Tensor in = x * 1.0;
    const std::vector<Tensor> y =
        how == How::plain ? f(std::span(&in, 1)) : recompute(f, std::vector{in}, keep);
    REQUIRE(y.size() == 4);
    CHECK_FALSE(y[3].requires_grad());
    CHECK(y[3].to_vector<std::int32_t>() == std::vector<std::int32_t>{0, 1, 2, 3});
    const std::uint64_t draws = autograd::random_state().draws;
    Tensor loss = sum(y[2] * 2.0);
    if ((used & 1) != 0) loss = loss + sum(y[0] * y[0]);
    if ((used & 2) != 0) loss = loss + y[1];
    loss.backward();
    CHECK(autograd::random_state().draws == draws);
    CHECK(runs == (how == How::plain ? 1 : 2));
    std::vector<std::vector<std::byte>> out{bytes_of(y[0]), bytes_of(y[1]), bytes_of(x.grad())};
    for (const Mixer* b : {&first, &second})
      for (const Tensor* p : {&b->up, &b->down, &b->scale})
        out.push_back(p->grad().defined() ? bytes_of(p->grad()) : std::vector<std::byte>());
    return out;
  };
  for (const int used : {0, 1, 2, 3}) {
    INFO("used " << used);
    const auto expected = run(How::plain, used, {});
    for (const Keep& keep : {Keep{}, Keep{.products = 2}}) {
      CHECK(run(How::recomputed, used, keep) == expected);
      CHECK(run(How::nested, used, keep) == expected);
    }
  }
}

TEST_CASE("a recomputed function with other results in backward is told") {
  const Device device = any_device();
  Tensor x = Tensor::ones({2}, f32, device);
  x.require_grad();
  int runs = 0;
  const auto y = recompute(
      [&](std::span<const Tensor> in) {
        std::vector<Tensor> out{in[0] * 2.0, in[0] * 3.0};
        if (++runs == 2) out.pop_back();
        return out;
      },
      std::vector{x});
  CHECK_THROWS_WITH(sum(y[0]).backward(), Catch::Contains("gives 1 results in backward, and gave 2 "
                                                          "in forward"));
  CHECK_THROWS_WITH(
      recompute([](std::span<const Tensor>) { return std::vector<Tensor>(); }, std::vector{x}),
      Catch::Contains("the function gives no result"));
}
