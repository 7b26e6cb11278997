// Linear layers with products of 8-bit floats: what they round, and that they round nothing else.
#include "tessera/autograd/fp8.hpp"

#include <cmath>

#include "tessera/autograd/recompute.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr Fp8Recipe kFp8Recipes[] = {Fp8Recipe::tensorwise, Fp8Recipe::blockwise};

// A matrix in f64, row by row.
struct HostMatrix {
  std::vector<double> at;
  std::int64_t rows, cols;

  static HostMatrix of(const Tensor& x) {
    return {raw::cast(x, f64).to_vector<double>(), x.size(0), x.size(1)};
  }
  double get(std::int64_t r, std::int64_t c) const {
    return at[static_cast<std::size_t>(r * cols + c)];
  }
  HostMatrix transposed() const {
    HostMatrix out{{}, cols, rows};
    for (std::int64_t c = 0; c < cols; ++c)
      for (std::int64_t r = 0; r < rows; ++r) out.at.push_back(get(r, c));
    return out;
  }
  // As 8-bit floats hold it whose scale is shared by `high` rows of `wide` elements.
  template <class T>
  HostMatrix rounded(std::int64_t high, std::int64_t wide) const {
    HostMatrix out = *this;
    for (std::int64_t r = 0; r < rows; r += high)
      for (std::int64_t c = 0; c < cols; c += wide) {
        double most = 0, scale = 0x1p-126;
        const auto each = [&](auto f) {
          for (std::int64_t i = r; i < std::min(rows, r + high); ++i)
            for (std::int64_t j = c; j < std::min(cols, c + wide); ++j)
              f(out.at[static_cast<std::size_t>(i * cols + j)]);
        };
        each([&](double x) { most = std::max(most, std::abs(x)); });
        while ((std::is_same_v<T, Float8E4M3> ? 448 : 57344) * scale < most) scale *= 2;
        each([&](double& x) { x = float{T(static_cast<float>(x / scale))} * scale; });
      }
    return out;
  }
};
// The operands of the recipe: rows along a product's sum, a weight, a gradient.
HostMatrix rows_in(Fp8Recipe recipe, const HostMatrix& x) {
  return recipe == Fp8Recipe::tensorwise ? x.rounded<Float8E4M3>(x.rows, x.cols)
                                         : x.rounded<Float8E4M3>(1, 128);
}
HostMatrix weight_in(Fp8Recipe recipe, const HostMatrix& w) {
  return recipe == Fp8Recipe::tensorwise ? w.rounded<Float8E4M3>(w.rows, w.cols)
                                         : w.rounded<Float8E4M3>(128, 128);
}
HostMatrix gradient_in(Fp8Recipe recipe, const HostMatrix& g) {
  return recipe == Fp8Recipe::tensorwise ? g.rounded<Float8E5M2>(g.rows, g.cols)
                                         : g.rounded<Float8E4M3>(1, 128);
}

// `got` is a b^T, by at most k + 4 roundings to f32 of the sum of magnitudes and one to its dtype.
void check_fp8_product(const Tensor& got, const HostMatrix& a, const HostMatrix& b) {
  REQUIRE(got.shape() == Shape{a.rows, b.rows});
  const HostMatrix found = HostMatrix::of(got);
  const double own = got.dtype() == bf16 ? 0x1p-8 : 0;
  double worst = 0;
  for (std::int64_t r = 0; r < a.rows; ++r)
    for (std::int64_t c = 0; c < b.rows; ++c) {
      double sum = 0, magnitude = 0;
      for (std::int64_t l = 0; l < a.cols; ++l) {
        sum += a.get(r, l) * b.get(c, l);
        magnitude += std::abs(a.get(r, l) * b.get(c, l));
      }
      const double bound =
          static_cast<double>(a.cols + 4) * 0x1p-24 * magnitude * (1 + own) + own * std::abs(sum);
      worst = std::max(worst, bound > 0 ? std::abs(found.get(r, c) - sum) / bound : 0);
    }
  CHECK(worst <= 1);
}

struct Fp8Layer {
  Tensor x, weight, bias, gradient;

  Fp8Layer(Draw& draw, DType dtype, std::int64_t rows, std::int64_t in, std::int64_t out) {
    const auto normal = [&](const Shape& shape) { return raw::cast(draw.normal(shape), dtype); };
    x = normal({rows, in}).require_grad();
    weight = normal({out, in}).require_grad();
    bias = normal({out}).require_grad();
    gradient = normal({rows, out});
  }
};

}  // namespace

TEST_CASE("linear_fp8 is the product of what 8 bits hold, and so are its derivatives") {
  Draw draw;
  CAPTURE(draw.seed);
  for (const Fp8Recipe recipe : kFp8Recipes)
    for (const DType dtype : {f32, bf16}) {
      Fp8Layer l(draw, dtype, 144, 272, 160);
      const Tensor y = linear_fp8(l.x, l.weight, {}, recipe);
      const HostMatrix x = HostMatrix::of(l.x.detach()), w = HostMatrix::of(l.weight.detach()),
                       g = HostMatrix::of(l.gradient);
      CHECK(y.dtype() == dtype);
      check_fp8_product(y.detach(), rows_in(recipe, x), weight_in(recipe, w));
      y.backward(l.gradient);
      check_fp8_product(l.x.grad(), gradient_in(recipe, g), weight_in(recipe, w).transposed());
      check_fp8_product(l.weight.grad(), gradient_in(recipe, g.transposed()),
                        rows_in(recipe, x.transposed()));
    }
}

TEST_CASE("a bias of linear_fp8 is added, and its gradient is that of linear") {
  Draw draw;
  CAPTURE(draw.seed);
  Fp8Layer l(draw, f32, 32, 48, 16);
  const Tensor y = linear_fp8(reshape(l.x, {2, 16, 48}), l.weight, l.bias, Fp8Recipe::tensorwise),
               without = linear_fp8(l.x, l.weight, {}, Fp8Recipe::tensorwise);
  REQUIRE(y.shape() == Shape{2, 16, 16});
  CHECK(bytes_of(y.detach()) == bytes_of((without + l.bias).detach()));
  y.backward(reshape(l.gradient, y.shape()));
  const Tensor summed = l.bias.grad() * 1.0;
  l.bias.zero_grad();
  linear(l.x, l.weight, l.bias).backward(l.gradient);
  CHECK(bytes_of(summed) == bytes_of(l.bias.grad()));
}

TEST_CASE("gradients of linear_fp8 add up where they are wanted") {
  Draw draw;
  CAPTURE(draw.seed);
  for (const Fp8Recipe recipe : kFp8Recipes) {
    Fp8Layer l(draw, f32, 32, 64, 48);
    linear_fp8(l.x, l.weight, {}, recipe).backward(l.gradient);
    const Tensor dx = l.x.grad() * 2.0, dw = l.weight.grad() * 2.0;
    l.x.zero_grad();
    l.weight.zero_grad();
    // One after the other into leaves, and both in one pass.
    const auto twice = GENERATE(false, true);
    if (twice)
      (linear_fp8(l.x, l.weight, {}, recipe) + linear_fp8(l.x, l.weight, {}, recipe))
          .backward(l.gradient);
    for (int i = 0; !twice && i < 2; ++i)
      linear_fp8(l.x, l.weight, {}, recipe).backward(l.gradient);
    CHECK(bytes_of(l.x.grad()) == bytes_of(dx));  // a sum and itself: nothing is rounded
    CHECK(bytes_of(l.weight.grad()) == bytes_of(dw));
  }
}

TEST_CASE("a recomputed linear_fp8 has the bits of one that is kept") {
  Draw draw;
  CAPTURE(draw.seed);
  Fp8Layer l(draw, bf16, 32, 64, 64);
  const auto f = [&](const Tensor& x) {
    return linear_fp8(gelu(linear_fp8(x, l.weight, l.bias, Fp8Recipe::tensorwise)), l.weight,
                      l.bias, Fp8Recipe::blockwise);
  };
  std::vector<std::vector<std::byte>> seen;
  for (int keep = -1; keep < 3; ++keep) {
    const Tensor y = keep < 0 ? f(l.x) : recompute(f, l.x, {.products = keep});
    y.backward(l.gradient);
    for (const Tensor* leaf : {&l.x, &l.weight, &l.bias}) {
      const std::vector<std::byte> bits = bytes_of(leaf->grad());
      if (keep < 0)
        seen.push_back(bits);
      else
        CHECK(bits == seen[static_cast<std::size_t>(leaf == &l.x ? 0 : leaf == &l.weight ? 1 : 2)]);
    }
    for (Tensor leaf : {l.x, l.weight, l.bias}) leaf.zero_grad();
  }
}

TEST_CASE("linear_fp8 says which sizes 16 does not divide") {
  Draw draw;
  const Fp8Layer narrow(draw, f32, 32, 24, 16), short_one(draw, f32, 31, 32, 16);
  const auto call = [](const Fp8Layer& l) {
    return linear_fp8(l.x, l.weight, {}, Fp8Recipe::tensorwise);
  };
  CHECK_THROWS_WITH(call(narrow),
                    Catch::Matchers::Contains("weight is [16, 24]; 16 must divide both"));
  CHECK_THROWS_WITH(call(short_one), Catch::Matchers::Contains("x has 31 rows"));
  const Fp8Layer other(draw, bf16, 32, 32, 16);
  CHECK_THROWS_WITH(
      linear_fp8(short_one.x, short_one.weight, other.bias, Fp8Recipe::tensorwise),
      Catch::Matchers::Contains("linear_fp8: bias is [16] of bf16, expected [16] of f32"));
  const NoGradGuard no_grad;  // without the weight's gradient any number of rows will do
  check_fp8_product(call(short_one),
                    rows_in(Fp8Recipe::tensorwise, HostMatrix::of(short_one.x.detach())),
                    weight_in(Fp8Recipe::tensorwise, HostMatrix::of(short_one.weight.detach())));
}

namespace {

// A function that may round what it makes, before two layers that read it; the bits of results and
// gradients.
template <class Make>
std::vector<std::vector<std::byte>> bits_of_layers(std::initializer_list<Tensor> inputs,
                                                   const Tensor& first, const Tensor& second,
                                                   Fp8Recipe recipe, const Tensor& gradient,
                                                   Make make) {
  const SharedFp8Input shared;
  const Tensor h = make();
  const Tensor y = linear_fp8(h, first, {}, recipe) + linear_fp8(h, second, {}, recipe);
  y.backward(gradient);
  std::vector<std::vector<std::byte>> bits{bytes_of(y.detach())};
  std::vector<Tensor> leaves(inputs);
  leaves.insert(leaves.end(), {first, second});
  for (Tensor leaf : leaves) {
    bits.push_back(bytes_of(leaf.grad()));
    leaf.zero_grad();
  }
  return bits;
}

}  // namespace

TEST_CASE("what norms and SwiGLU round themselves has the bits of what they write, rounded") {
  Draw draw;
  CAPTURE(draw.seed);
  for (const Fp8Recipe recipe : kFp8Recipes)
    for (const DType dtype : {f32, bf16, f16}) {
      const auto leaf = [&](const Shape& shape) {
        return raw::cast(draw.normal(shape), dtype).require_grad();
      };
      const Tensor x = leaf({2, 48, 160}), residual = leaf({2, 48, 160}), w = leaf({160}),
                   b = leaf({160}), first = leaf({32, 160}), second = leaf({32, 160}),
                   gradient = raw::cast(draw.normal({2, 48, 32}), dtype), both = leaf({2, 48, 320});
      const auto check = [&](std::initializer_list<Tensor> inputs, auto make) {
        const auto separate = bits_of_layers(inputs, first, second, recipe, gradient,
                                             [&] { return make(std::nullopt); });
        CHECK(bits_of_layers(inputs, first, second, recipe, gradient,
                             [&] { return make(std::optional(recipe)); }) == separate);
      };
      using Rounded = std::optional<Fp8Recipe>;
      check({x, w}, [&](Rounded r) { return rms_norm(x, w, 1e-5, r); });
      check({x, w, b}, [&](Rounded r) { return layer_norm(x, w, b, 1e-5, r); });
      const Tensor turned = leaf({48, 2, 160});
      check({turned, w}, [&](Rounded r) { return rms_norm(transpose(turned, 0, 1), w, 1e-5, r); });
      check({x, residual}, [&](Rounded r) { return swiglu(x, residual, r); });
      check({both}, [&](Rounded r) { return swiglu(both, r); });
      // 16 elements off, as a slice of a wider projection is, and 8, where they are copied first.
      check({both},
            [&](Rounded r) { return swiglu(slice(both, 2, 16, 176), slice(both, 2, 8, 168), r); });
      check({x, residual, w}, [&](Rounded r) {
        const auto [sum, norm] = add_rms_norm(x, residual * 1.0, w, 1e-5, r);
        return r ? norm : norm + sum * 0.0;
      });
      check({x, residual, w, b},
            [&](Rounded r) { return add_layer_norm(x, residual * 1.0, w, b, 1e-5, r).norm; });
    }
}

TEST_CASE("what is rounded where it is made is found by its layers, or they say so") {
  Draw draw;
  const Fp8Layer l(draw, f32, 32, 64, 48);
  const Tensor w = Tensor::ones({64}, f32, draw.device);
  constexpr auto kTensor = Fp8Recipe::tensorwise, kBlocks = Fp8Recipe::blockwise;
  const auto norm = [&](const Tensor& x, Fp8Recipe r) { return rms_norm(x, w, 1e-5, r); };
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(norm(l.x, kTensor), Contains("rms_norm: no SharedFp8Input is around"));
  Tensor lost;
  {
    const SharedFp8Input shared;
    lost = norm(l.x, kTensor);
    CHECK(lost.dtype() == e4m3);
    CHECK(lost.shape() == l.x.shape());
    {
      const SharedFp8Input inner;  // finds it in the one around
      const Tensor y = linear_fp8(lost, l.weight, l.bias, kTensor);
      CHECK(bytes_of(y.detach()) ==
            bytes_of(linear_fp8(rms_norm(l.x, w, 1e-5), l.weight, l.bias, kTensor).detach()));
    }
    CHECK_THROWS_WITH(linear_fp8(lost, l.weight, {}, kBlocks),
                      Contains("x is in 8 bits, of another recipe"));
    // Its codes are no values, to whatever copies, casts or reads them.
    CHECK_THROWS_AS(linear(lost, l.weight), ContractError);
    CHECK_THROWS_AS(lost + lost, ContractError);
    CHECK_THROWS_WITH(cast(lost, f32),
                      Contains("'quantize_norm' has rounded the tensor to 8 bits for linear_fp8"));
    CHECK_THROWS_WITH(cat(std::array{lost, lost}, 0), Contains("for linear_fp8"));
    CHECK_THROWS_WITH(contiguous(transpose(lost, 0, 1)), Contains("for linear_fp8"));
    CHECK_THROWS_WITH(lost.to_vector<Float8E4M3>(), Contains("for linear_fp8"));
    CHECK_THROWS_WITH(raw::moved(lost, draw.device.host()), Contains("for linear_fp8"));
    CHECK_THROWS_WITH(recompute([](const Tensor& x) { return x; }, lost),
                      Contains("recompute: 'quantize_norm' has rounded the tensor"));
    CHECK_THROWS_WITH(linear_fp8(reshape(lost, {2, 16, 64}), l.weight, {}, kTensor),
                      Contains("but its scales are lost"));
    CHECK_THROWS_WITH(linear_fp8(raw::cast(l.x.detach(), e4m3), l.weight, {}, kTensor),
                      Contains("cast it to f32 or bf16"));
    // A weight of another dtype than what was rounded.
    for (const DType other : {bf16, f64, i32})
      CHECK_THROWS_WITH(linear_fp8(lost, raw::cast(l.weight.detach(), other), {}, kTensor),
                        Contains("linear_fp8: "));
    linear_fp8(l.x, l.weight, {}, kTensor);  // rounds another x
    CHECK_THROWS_WITH(linear_fp8(lost, l.weight, {}, kTensor), Contains("but its scales are lost"));
    {
      const NoGradGuard no_grad;
      lost = norm(l.x, kTensor);
    }
    CHECK_THROWS_WITH(linear_fp8(lost, l.weight, {}, kTensor), Contains("without gradients"));
    const Tensor short_one = norm(slice(l.x, 0, 0, 31), kTensor);
    CHECK_THROWS_WITH(linear_fp8(short_one, l.weight, {}, kTensor),
                      Contains("linear_fp8: x has 31 rows"));
    check_fp8_product(
        linear_fp8(short_one, l.weight.detach(), {}, kTensor).detach(),
        rows_in(kTensor, HostMatrix::of(rms_norm(slice(l.x.detach(), 0, 0, 31), w, 1e-5))),
        weight_in(kTensor, HostMatrix::of(l.weight.detach())));
    CHECK_THROWS_WITH(rms_norm(slice(l.x, 1, 0, 24), slice(w, 0, 0, 24), 1e-5, kTensor),
                      Contains("of a width that 16 divides"));
    const Tensor wide = raw::cast(draw.normal({32, 64}), f64);
    CHECK_THROWS_WITH(swiglu(wide, wide, kTensor), Contains("swiglu: x is [32, 64] of f64"));
    CHECK_THROWS_WITH(swiglu(lost, lost, kTensor), Contains("swiglu: x is [32, 64] of e4m3"));
    CHECK_THROWS_WITH(swiglu(l.x, l.gradient, kTensor), Contains("swiglu: gate is"));
  }
  CHECK_THROWS_WITH(linear_fp8(lost, l.weight, {}, kTensor), Contains("but its scales are lost"));
}

TEST_CASE("scopes of rounded inputs end in any order") {
  Draw draw;
  const Fp8Layer l(draw, f32, 32, 64, 48);
  const Tensor w = Tensor::ones({64}, f32, draw.device);
  constexpr auto kTensor = Fp8Recipe::tensorwise;
  auto outer = std::make_unique<SharedFp8Input>(), inner = std::make_unique<SharedFp8Input>();
  const Tensor h = rms_norm(l.x, w, 1e-5, kTensor);
  outer.reset();
  CHECK(linear_fp8(h, l.weight, {}, kTensor).shape() == Shape{32, 48});
  inner.reset();
  CHECK_THROWS_AS(rms_norm(l.x, w, 1e-5, kTensor), ContractError);
  CHECK(linear_fp8(l.x, l.weight, {}, kTensor).shape() == Shape{32, 48});
}
