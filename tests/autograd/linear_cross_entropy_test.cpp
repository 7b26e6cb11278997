// The loss whose logits are made in chunks: against the same loss of logits that are all there.
#include <array>
#include <cmath>
#include <optional>

#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::behind;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

// As linear_cross_entropy means it.
Tensor in_one(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& targets) {
  return cross_entropy(linear(reshape(x, {targets.numel(), x.size(-1)}), weight, bias), targets);
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double v : values) most = std::max(most, std::abs(v));
  return most;
}
std::vector<double> read(const Tensor& t) { return raw::cast(t, f64).to_vector<double>(); }

struct Inputs {
  Tensor x, weight, bias, targets;  // leaves
  void clear() {
    for (Tensor* t : {&x, &weight, &bias}) t->zero_grad();
  }
};
Inputs draw_inputs(Draw& draw, std::int64_t rows, std::int64_t width, std::int64_t vocab,
                   DType dtype) {
  const auto leaf = [&](const Shape& shape) {
    return raw::cast(draw.normal(shape), dtype).require_grad();
  };
  return {leaf({rows, width}), leaf({vocab, width}), leaf({vocab}),
          draw.indices({rows}, vocab, i32)};
}

}  // namespace

TEST_CASE("derivatives of linear_cross_entropy") {
  Draw draw;
  const DType dtype = GENERATE(i32, i64);
  const std::int64_t chunk = GENERATE(1, 2, 3, 6, 100);
  // That of the loss is 1, and 0.5 behind the factor, whatever is said of it.
  const std::optional<double> said = GENERATE(std::optional<double>(), 1.0, -3.0);
  INFO("targets " << dtype << ", chunks of " << chunk << ", gradient " << said.value_or(0)
                  << ", seed " << draw.seed);
  const auto f = [&](const auto& v) {
    return linear_cross_entropy(v[0], v[1], v[2], v[3], chunk, {.gradient = said});
  };
  check_gradients(
      f, {draw.normal({6, 3}), draw.normal({5, 3}), draw.normal({5}), draw.indices({6}, 5, dtype)});
  check_gradients(f, {draw.normal({2, 3, 3}), draw.normal({5, 3}), draw.normal({5}),
                      draw.indices({6}, 5, dtype)});
  check_gradients(  // gradients that no leaf takes, strided operands, a factor on the loss
      [&](const auto& v) {
        return linear_cross_entropy(transpose(v[0], 0, 1), transpose(v[1], 0, 1), behind(v[2]),
                                    v[3], chunk, {.gradient = said}) *
               0.5;
      },
      {draw.normal({3, 6}), draw.normal({3, 5}), draw.normal({5}), draw.indices({6}, 5, dtype)});
  check_gradients(  // tied: both uses add to one place
      [&](const auto& v) {
        return linear_cross_entropy(embedding(v[0], v[1]), v[0], {}, v[1], chunk,
                                    {.gradient = said});
      },
      {draw.normal({5, 3}), draw.indices({6}, 5, dtype)});
  const Tensor x = draw.normal({6, 3}), weight = draw.normal({5, 3}),
               targets = draw.indices({6}, 5, dtype);
  check_gradients(
      [&](const auto& v) {
        return linear_cross_entropy(v[0], weight, {}, targets, chunk, {.gradient = said});
      },
      {x});
  check_gradients(
      [&](const auto& v) {
        return linear_cross_entropy(x, v[0], {}, targets, chunk, {.gradient = said});
      },
      {weight});
}

// A row's arithmetic does not know of chunks: loss and d_x have the same bits. d_weight and d_bias
// are sums over N rows of terms g x: in f32 two orders of a sum differ by at most 2 N 2^-24
// sum|terms|, and sum over rows of |g| is at most 1, a row's being 1 / N. A 16-bit place is rounded
// to within half of `ulp` of what is there by then, at most that sum, at every chunk and once for
// the whole.
TEST_CASE("chunks of logits change the order of the weight's sum and nothing else") {
  Draw draw;
  const DType dtype = GENERATE(f32, bf16, f16, f64);
  const std::int64_t rows = 67, width = 48, vocab = 33;
  Inputs in = draw_inputs(draw, rows, width, vocab, dtype);
  const Tensor whole = in_one(in.x, in.weight, in.bias, in.targets);
  whole.backward();
  const auto dx = read(in.x.grad()), dw = read(in.weight.grad()), db = read(in.bias.grad());
  const double most = largest(read(in.x)),
               wide = 2 * static_cast<double>(rows) * (dtype == f64 ? 0x1p-53 : 0x1p-24),
               half_ulp = dtype == bf16  ? 0x1p-9
                          : dtype == f16 ? 0x1p-12
                                         : 0;
  for (const std::int64_t chunk : {1, 2, 30, 66, 67, 1000}) {
    INFO(dtype << ", chunks of " << chunk << " rows, seed " << draw.seed);
    in.clear();
    const Tensor loss = linear_cross_entropy(in.x, in.weight, in.bias, in.targets, chunk);
    CHECK(loss.dtype() == whole.dtype());
    CHECK(loss.item() == whole.item());
    loss.backward();
    CHECK(read(in.x.grad()) == dx);
    const double chunks = std::ceil(static_cast<double>(rows) / static_cast<double>(chunk)),
                 bound = wide + half_ulp * (2 * chunks + 1);
    const auto off = [](const std::vector<double>& a, const std::vector<double>& b) {
      double worst = 0;
      for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
      return worst;
    };
    CHECK(off(read(in.weight.grad()), dw) <= bound * most);
    CHECK(off(read(in.bias.grad()), db) <= bound);
    CHECK(largest(dw) > 0);
  }
}

TEST_CASE("linear_cross_entropy holds a chunk of logits at most") {
  Draw draw;
  INFO("seed " << draw.seed);
  Ledger& ledger = Memory::of(draw.device).ledger();
  const std::int64_t rows = 64, vocab = 512, chunk = 8, bytes = 4 * rows * vocab;
  Inputs in = draw_inputs(draw, rows, 4, vocab, f32);
  const auto peaks = [&](const auto& f) {
    f().backward();  // the gradients of the leaves are there from now on
    const std::int64_t held = ledger.live_bytes();
    ledger.reset_peak();
    const Tensor loss = f();
    const std::int64_t kept = ledger.live_bytes() - held, forward = ledger.peak_bytes() - held;
    ledger.reset_peak();
    loss.backward();
    return std::array{kept, forward, ledger.peak_bytes() - held};
  };
  const auto whole = peaks([&] { return in_one(in.x, in.weight, in.bias, in.targets); });
  const auto chunked =
      peaks([&] { return linear_cross_entropy(in.x, in.weight, in.bias, in.targets, chunk); });
  for (const std::int64_t peak : whole) CHECK(peak >= bytes);
  // What else is there: one number a row twice or three times, x's and the bias's gradients, all
  // small beside a chunk; and an allocation is rounded up to 256 bytes.
  CHECK(chunked[0] <= 4096);
  for (const std::int64_t peak : chunked) CHECK(peak <= bytes / 8 + 8192);
}

// What is summed is the same, in the same order, and d_x has the same bits. Where the leaf has 16
// bits, lean rounds at every chunk and fast once; else the sum is one of f32 in both.
TEST_CASE("a loss whose gradient is known makes the gradients of lean in forward") {
  Draw draw;
  const DType dtype = GENERATE(f32, bf16, f16, f64);
  const std::int64_t rows = 67, width = 48, vocab = 33, chunk = GENERATE(1, 30, 67);
  const double gradient = GENERATE(1.0, 0.25);
  INFO(dtype << ", chunks of " << chunk << ", gradient " << gradient << ", seed " << draw.seed);
  Inputs in = draw_inputs(draw, rows, width, vocab, dtype);
  const auto gradients = [&](std::optional<double> said, double factor) {
    in.clear();
    const Tensor loss =
        linear_cross_entropy(in.x, in.weight, in.bias, in.targets, chunk, {.gradient = said}) *
        factor;
    loss.backward();
    return std::array{std::vector{loss.item()}, read(in.x.grad()), read(in.weight.grad()),
                      read(in.bias.grad())};
  };
  const auto lean = gradients({}, gradient), fast = gradients(gradient, gradient);
  CHECK(fast[0] == lean[0]);
  CHECK(fast[1] == lean[1]);
  const double most = largest(read(in.x)) * gradient,
               half_ulp = dtype == bf16  ? 0x1p-9
                          : dtype == f16 ? 0x1p-12
                                         : 0,
               chunks = std::ceil(static_cast<double>(rows) / static_cast<double>(chunk));
  const auto off = [&](std::size_t i) {
    double worst = 0;
    for (std::size_t k = 0; k < lean[i].size(); ++k)
      worst = std::max(worst, std::abs(lean[i][k] - fast[i][k]));
    return worst;
  };
  // Of d_weight the sum over rows of |terms| is at most `most`; a chunk's part of d_bias is rounded
  // to 16 bits by its sum over rows, too.
  CHECK(off(2) <= half_ulp * (chunks + 1) * most);
  CHECK(off(3) <= half_ulp * (2 * chunks + 1) * gradient);
  CHECK(largest(lean[2]) > 0);
  // Another gradient than was said: one factor, a power of two, on what was made.
  const auto other = gradients(gradient, gradient / 2);
  for (const std::size_t i : {1, 2, 3})
    for (std::size_t k = 0; k < fast[i].size(); ++k)
      CHECK(std::abs(other[i][k] - fast[i][k] / 2) <= (dtype == f16 ? 0x1p-25 : 0));
}

TEST_CASE("a chunk of a loss whose gradient is known takes one kernel beside its three products") {
  Draw draw;
  const std::int64_t rows = 64;
  Inputs in = draw_inputs(draw, rows, 16, 32, f32);
  const auto launches_of = [&](std::int64_t chunk) {
    const std::uint64_t before = draw.device.context().launches();
    const Tensor loss =
        linear_cross_entropy(in.x, in.weight, {}, in.targets, chunk, {.gradient = 1.0});
    return draw.device.context().launches() - before;
  };
  CHECK(launches_of(8) - launches_of(16) == 4 * (8 - 4));
}

TEST_CASE("gradients that forward has made go with their graph, and stay with a kept one") {
  Draw draw;
  INFO("seed " << draw.seed);
  Ledger& ledger = Memory::of(draw.device).ledger();
  const std::int64_t rows = 64, vocab = 512, width = 16, of_weight = 4 * vocab * width,
                     of_x = 4 * rows * width;
  Inputs in = draw_inputs(draw, rows, width, vocab, f32);
  const auto loss_of = [&] {
    return linear_cross_entropy(in.x, in.weight, {}, in.targets, 8, {.gradient = 1.0});
  };
  const std::int64_t before = ledger.live_bytes();
  const auto held = [&] { return ledger.live_bytes() - before; };
  // Beside them: the loss, its gradient and the graph's scalars, rounded up to 256 bytes each.
  {
    const NoGradGuard no_grad;
    const Tensor loss = loss_of();
    CHECK(held() <= 1024);
  }
  {
    const Tensor loss = loss_of();
    CHECK(held() >= of_weight + of_x);
    CHECK(held() <= of_weight + of_x + 1024);
  }
  CHECK(held() == 0);
  const Tensor loss = loss_of();
  loss.backward({}, true);
  const auto once = read(in.weight.grad());
  loss.backward();
  CHECK(held() <= of_weight + of_x + 1024);  // the leaves' own
  const auto twice = read(in.weight.grad());
  for (std::size_t k = 0; k < once.size(); ++k) CHECK(twice[k] == 2 * once[k]);
  CHECK_THROWS_AS(linear_cross_entropy(in.x, in.weight, {}, in.targets, 8, {.gradient = 0.0}),
                  ContractError);
  CHECK_THROWS_AS(linear_cross_entropy(in.x, in.weight, {}, in.targets, 8, {.gradient = INFINITY}),
                  ContractError);
}

TEST_CASE("a recomputed loss that knows its gradient makes the gradients in its second run") {
  Draw draw;
  INFO("seed " << draw.seed);
  Ledger& ledger = Memory::of(draw.device).ledger();
  const std::int64_t rows = 64, vocab = 512, width = 16;
  Inputs in = draw_inputs(draw, rows, width, vocab, f32);
  const auto loss_of = [&](const Tensor& x) {
    return linear_cross_entropy(x, in.weight, {}, in.targets, 8, {.gradient = 1.0});
  };
  loss_of(in.x).backward();
  const auto dx = read(in.x.grad()), dw = read(in.weight.grad());
  in.clear();
  const std::int64_t before = ledger.live_bytes();
  const Tensor loss = recompute(loss_of, in.x);
  CHECK(ledger.live_bytes() - before <= 1024);  // the loss, rounded up
  loss.backward();
  CHECK(read(in.x.grad()) == dx);
  CHECK(read(in.weight.grad()) == dw);
}

TEST_CASE("a target outside the vocabulary makes the chunked loss NaN, and its row's gradient") {
  Draw draw;
  INFO("seed " << draw.seed);
  Inputs in = draw_inputs(draw, 5, 3, 4, f32);
  const Tensor targets = Tensor::from(std::vector<std::int64_t>{0, 3, 4, -1, 2}, {5}, draw.device);
  const Tensor loss = linear_cross_entropy(in.x, in.weight, {}, targets, 2);
  CHECK(std::isnan(loss.item()));
  loss.backward();
  const auto dx = read(in.x.grad());
  for (std::size_t r = 0; r < 5; ++r) CHECK(std::isnan(dx[3 * r]) == (r == 2 || r == 3));
}

TEST_CASE("linear_cross_entropy names what does not fit") {
  Draw draw;
  const Tensor x = draw.normal({4, 3}), weight = draw.normal({5, 3}),
               targets = draw.indices({4}, 5, i32);
  const auto fails = [](const std::string& expected, const auto&... arguments) {
    try {
      linear_cross_entropy(arguments...);
    } catch (const ContractError& e) {
      INFO(e.what());
      CHECK(std::string(e.what()).find(expected) != std::string::npos);
      return;
    }
    FAIL_CHECK("no error that says " << expected);
  };
  fails("chunks of 0 rows", x, weight, Tensor(), targets, 0);
  fails("weight is [5, 2]", x, draw.normal({5, 2}), Tensor(), targets, 1);
  fails("bias is [4]", x, weight, draw.normal({4}), targets, 1);
  fails("expected [5] of", x, weight, Tensor::zeros({5}, bf16, x.device()), targets, 1);
  fails("targets are [3]", x, weight, Tensor(), draw.indices({3}, 5, i32), 1);
  fails("of f64", x, weight, Tensor(), draw.normal({4}), 1);
  fails("the mean of nothing", draw.normal({0, 3}), weight, Tensor(), draw.indices({0}, 5, i32), 1);
}
