// Recomputation that keeps products and attention: what is kept, what is made again, and that no
// bit shows it.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/autograd/attention.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::any_device;
using tessera::testing::bytes_of;

namespace {

constexpr Keep kAll{.products = 1, .attention = true};

// A layer with every operation that can be kept, dropout of both kinds of draws, and two inputs.
struct Layer {
  static constexpr std::int64_t kWidth = 8, kLength = 5, kHeads = 2;
  Tensor qkv, out, up, bias, down, mix, scale;

  Layer(std::uint64_t seed, DType dtype, const Device& device) {
    const auto make = [&](const Shape& shape, double mean) {
      return Tensor::normal(shape, mean, 0.3, ++seed, dtype, device).require_grad();
    };
    qkv = make({3 * kWidth, kWidth}, 0);
    out = make({kWidth, kWidth}, 0);
    up = make({16, kWidth}, 0);
    bias = make({16}, 0);
    down = make({kWidth, 16}, 0);
    mix = make({kWidth, kWidth}, 0);
    scale = make({kWidth}, 1);
  }
  std::vector<Tensor> parameters() const { return {qkv, out, up, bias, down, mix, scale}; }

  // x, condition [2, T, C] -> [2, T, C].
  Tensor operator()(std::span<const Tensor> in) const {
    // Copies, so that each input's gradients are added up in one order, recomputed or not.
    const Tensor x = in[0] * 1.0, condition = in[1] * 1.0;
    const Tensor normed = rms_norm(x, scale, 1e-5);
    const Tensor heads = reshape(linear(normed, qkv), {2, kLength, 3 * kHeads, kWidth / kHeads});
    Tensor h = x + linear(reshape(causal_attention(heads, kHeads), x.shape()), out);
    const auto bhtd = [&](const Tensor& t) {
      return transpose(reshape(t, {2, kLength, kHeads, kWidth / kHeads}), 1, 2);
    };
    // One that makes all scores, for its dropout, and one that does not.
    h = h + reshape(transpose(scaled_dot_product_attention(bhtd(h), bhtd(condition), bhtd(x),
                                                           {.dropout = 0.2, .dropout_key = 3}),
                              1, 2),
                    x.shape());
    h = h +
        reshape(transpose(scaled_dot_product_attention(bhtd(h), bhtd(condition), bhtd(x)), 1, 2),
                x.shape());
    h = h * tanh(matmul(condition, mix)) + einsum("btc,cd->btd", tanh(h), mix);
    const auto draw = static_cast<std::int64_t>(autograd::random_state().draws++);
    const auto without_gradients = [&] {
      const NoGradGuard guard;
      return tanh(matmul(h, mix));
    };
    h = h + without_gradients();
    return h + dropout(linear(linear_gelu(h, up, bias), down), 0.25, 9, draw * 1000);
  }
};

struct Launches final : Observer {
  void launched(StreamId, Tick, const Op& op) override { ++count[op.name]; }
  std::map<std::string, int> count;
};

// What is launched in the backward of f(x), where f is recomputed.
std::map<std::string, int> launches_again(const std::function<Tensor(const Tensor&)>& f,
                                          const Tensor& x, Keep keep) {
  const Tensor loss = sum(recompute(f, x, keep));
  const auto seen = std::make_shared<Launches>();
  DeviceContext& context = x.device().context();
  context.add_observer(seen);
  loss.backward();
  context.remove_observer(*seen);
  return seen->count;
}

}  // namespace

TEST_CASE("selective recomputation gives the same values and gradients, bit by bit") {
  const Device device = any_device();
  const DType dtype = GENERATE(f32, f64, bf16);
  const std::uint64_t seed = testing::fresh_seed();
  INFO(dtype << ", seed " << seed);
  using F = std::function<Tensor(std::span<const Tensor>)>;
  using How = std::function<Tensor(const F& first, const F& second, const std::vector<Tensor>& in)>;
  const auto run = [&](const How& how, int backwards = 1) {
    const autograd::RandomStateGuard random({.seed = seed, .draws = 3});
    const Layer first(seed, dtype, device), second(seed + 10, dtype, device);
    std::vector<Tensor> in;
    for (const std::uint64_t key : {20, 21})
      in.push_back(
          Tensor::normal({2, Layer::kLength, Layer::kWidth}, 0, 1, seed + key, dtype, device)
              .require_grad());
    const Tensor y = how(first, second, in);
    CHECK(autograd::random_state().draws == 5);
    const Tensor loss = sum(y * y);
    for (int left = backwards; left > 0; --left) loss.backward({}, left > 1);
    std::vector<std::vector<std::byte>> all{bytes_of(y)};
    for (const Tensor& x : in) all.push_back(bytes_of(x.grad()));
    for (const Layer* b : {&first, &second})
      for (const Tensor& p : b->parameters()) all.push_back(bytes_of(p.grad()));
    return all;
  };
  const auto expected = run([](const F& f, const F& g, const std::vector<Tensor>& in) {
    const Tensor h[] = {f(in), in[1]};
    return g(h);
  });
  const auto each_with = [](Keep keep) {
    return [keep](const F& f, const F& g, const std::vector<Tensor>& in) {
      return recompute(g, {recompute(f, in, keep), in[1]}, keep);
    };
  };
  for (const Keep keep : {Keep{.products = 1}, Keep{.products = 2}, Keep{.products = 3},
                          Keep{.attention = true}, Keep{.products = 2, .attention = true}, kAll})
    CHECK(run(each_with(keep)) == expected);

  // Whichever of two nested functions keeps something.
  for (const Keep outer : {Keep(), kAll})
    for (const Keep inner : {Keep(), Keep{.products = 1}, kAll})
      CHECK(run([&](const F& f, const F& g, const std::vector<Tensor>& in) {
              const auto both = [f, g, inner](std::span<const Tensor> x) {
                const Tensor h = recompute(f, {x[0], x[1]}, inner);
                return g(std::vector{h, x[1]});
              };
              return recompute(both, in, outer);
            }) == expected);

  // A retained graph runs again from what is kept.
  const auto twice = run([](const F& f, const F& g,
                            const std::vector<Tensor>& in) { return g(std::vector{f(in), in[1]}); },
                         2);
  CHECK(run(each_with(kAll), 2) == twice);
}

TEST_CASE("what is kept is not made again, and everything else is") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto make = [&](const Shape& shape) {
    return Tensor::normal(shape, 0, 1, 1, f32, device).require_grad();
  };
  const Tensor x = make({2, 6, 8}), scale = make({8}), w = make({24, 8}), v = make({8, 8});
  // Two products and an attention behind a norm, and one at the end.
  const auto f = [&](const Tensor& t) {
    const Tensor normed = rms_norm(t, scale, 1e-5);
    const Tensor heads = reshape(linear(normed, w), {2, 6, 6, 4});
    const Tensor o = reshape(causal_attention(tanh(heads), 2), t.shape());
    return t + linear(sigmoid(linear(o, v)), v);
  };
  auto none = launches_again(f, x, {}), products = launches_again(f, x, {.products = 1}),
       attention = launches_again(f, x, {.attention = true}), all = launches_again(f, x, kAll),
       second = launches_again(f, x, {.products = 2});
  const int derivatives = 6;                 // of three weights and three inputs
  CHECK(none["matmul"] == derivatives + 2);  // the last one is not made again
  CHECK(attention["matmul"] == derivatives + 2);
  CHECK(products["matmul"] == derivatives);
  CHECK(all["matmul"] == derivatives);
  CHECK(second["matmul"] == derivatives + 1);
  CHECK(none["attention"] == 1);
  CHECK(products["attention"] == 1);
  CHECK(attention["attention"] == 0);
  CHECK(all["attention"] == 0);
  for (const char* const name : {"attention", "matmul"})
    for (auto* const counts : {&none, &products, &attention, &all}) counts->erase(name);
  CHECK(none.at("rms_norm") == 1);
  CHECK(none.at("tanh") == 1);
  CHECK(products == none);
  CHECK(attention == none);
  CHECK(all == none);
}

TEST_CASE("a product that a function inside takes is kept") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto make = [&](const Shape& shape) {
    return Tensor::normal(shape, 0, 1, 1, f32, device).require_grad();
  };
  const Tensor x = make({2, 8}), w = make({8, 8});
  const auto f = [&](const Tensor& t) {
    return recompute([&](const Tensor& u) { return tanh(u); }, matmul(tanh(t), w));
  };
  const int none = launches_again(f, x, {})["matmul"], kept = launches_again(f, x, kAll)["matmul"];
  CHECK(none == 3);  // again, and two derivatives
  CHECK(kept == 2);
}

TEST_CASE("of a recomputed function its inputs are kept, and the results that Keep names") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger& ledger = Memory::of(device).ledger();
  const auto make = [&](const Shape& shape) {
    return Tensor::zeros(shape, f32, device).require_grad();
  };
  const std::int64_t T = 64, C = 32;
  const Tensor x = make({2, T, C}), w = make({3 * C, C}), v = make({C, C});
  const auto kept = [&](Keep keep, bool uses_the_last) {
    const auto f = [&](const Tensor& t) {
      const Tensor heads = reshape(linear(tanh(t), w), {2, T, 12, C / 4});
      const Tensor y = linear(reshape(causal_attention(heads, 4), t.shape()), v);
      return uses_the_last ? t + tanh(y) : t + y;
    };
    const Tensor in = x * 1.0;
    const std::int64_t before = ledger.live_bytes();
    const Tensor y = recompute(f, in, keep);
    return ledger.live_bytes() - before;
  };
  const std::int64_t one = 2 * T * C * 4, row = 2 * 4 * T * 4;  // of x, and a number a row and head
  const std::int64_t result = one;
  CHECK(kept({}, false) == result);
  CHECK(kept({.products = 1}, false) == result + 3 * one);
  CHECK(kept({.products = 1}, true) == result + 4 * one);
  CHECK(kept({.products = 2}, true) == result + 3 * one);  // the first of two
  CHECK(kept({.attention = true}, true) == result + one + row);
  CHECK(kept(kAll, false) == result + 4 * one + row);
  {
    const NoGradGuard nothing;
    CHECK(kept(kAll, true) == result);
    CHECK_THROWS_WITH(kept({.products = -1}, true), Catch::Contains("keep.products is -1"));
  }
}

TEST_CASE("a function that is not the same when it runs again is told so in one line") {
  const Device device = any_device();
  const auto make = [&](const Shape& shape) {
    return Tensor::normal(shape, 0, 1, 1, f32, device).require_grad();
  };
  const Tensor x = make({2, 4}), w = make({4, 4}), narrow = make({4, 3});
  enum What { product, linear_layer, other_shape, fewer, more };
  const auto [second, expected] = GENERATE(table<What, std::string>(
      {{linear_layer, "is 'linear' of [2, 4] in f32 and [4, 4] in f32, in forward it was 'matmul'"},
       {other_shape,
        "is 'matmul' of [2, 4] in f32 and [4, 3] in f32, in forward it was 'matmul' "
        "of [2, 4] in f32 and [4, 4] in f32"},
       {fewer, "has 0 products and attentions, in forward it had 1"},
       {more, "number 2 is 'matmul' of [2, 4] in f32 and [4, 4] in f32, in forward it was none"}}));
  What what = product;
  const auto f = [&](const Tensor& t) {
    switch (what) {
      case product:
        return tanh(matmul(t, w));
      case linear_layer:
        return tanh(linear(t, w));
      case other_shape:
        return tanh(matmul(t, narrow));
      case fewer:
        return tanh(t);
      case more:
        return tanh(matmul(matmul(t, w), w));
    }
    return t;
  };
  const Tensor y = recompute(f, x, kAll);
  what = second;
  CHECK_THROWS_WITH(sum(y).backward(), Catch::Contains("recompute: in backward the function") &&
                                           Catch::Contains(expected) &&
                                           Catch::Contains("the same each time"));
  CHECK_FALSE(autograd::in_backward());
  CHECK_FALSE(x.grad().defined());
  what = product;
  sum(recompute(f, x, kAll)).backward();
  const Tensor same = x.grad();
  Tensor z = x.detach();
  z.require_grad();
  sum(f(z)).backward();
  CHECK(same.to_vector<float>() == z.grad().to_vector<float>());
}

TEST_CASE("attention by all scores is not given what the kernel has left") {
  const Device device = any_device();
  const Tensor x = Tensor::normal({2, 4, 4, 8}, 0, 1, 1, f32, device).require_grad();
  double dropout = 0;  // with which the kernel does not serve
  const Tensor y = recompute(
      [&](const Tensor& t) {
        return scaled_dot_product_attention(t, t, t, {.dropout = dropout, .dropout_key = 3});
      },
      x, kAll);
  dropout = 0.5;
  CHECK_THROWS_WITH(sum(y).backward(), Catch::Contains("is 'attention by scores' of") &&
                                           Catch::Contains("in forward it was 'attention'"));
}

TEST_CASE("a second run that failed leaves what is kept usable, and a write is noticed") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 2, 3, 4}, {2, 2}, device).require_grad();
  const Tensor w = Tensor::from({5, 6, 7, 8}, {2, 2}, device).require_grad();
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensor& t) {
        const Tensor z = tanh(matmul(tanh(matmul(t, w)), w));
        if (++calls == 2) throw std::runtime_error("no luck");
        return z;
      },
      x, kAll);
  CHECK_THROWS_WITH(y.backward(Tensor::ones({2, 2}, f32, device)), "no luck");
  y.backward(Tensor::ones({2, 2}, f32, device));
  Tensor same = x.detach();
  same.require_grad();
  tanh(matmul(tanh(matmul(same, w)), w)).backward(Tensor::ones({2, 2}, f32, device));
  CHECK(x.grad().to_vector<float>() == same.grad().to_vector<float>());

  Tensor product;
  const Tensor written = recompute(
      [&](const Tensor& t) {
        product = matmul(t, w);
        return tanh(product);
      },
      x, kAll);
  raw::fill(product, 0);
  CHECK_THROWS_WITH(sum(written).backward(), Catch::Contains("was written by 'fill'"));
}
