// Derivatives of the functions that layers are made of. Parameters are leaves, so their gradients
// take the direct way; an operation in front of them makes them take the other one.
#include <algorithm>
#include <tuple>

#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::behind;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

TEST_CASE("derivatives of softmax") {
  Draw draw;
  INFO("seed " << draw.seed);
  check_gradients([](const auto& v) { return softmax(v[0]); }, {draw.normal({3, 5})});
  check_gradients([](const auto& v) { return softmax(transpose(v[0], 0, 1)); },
                  {draw.normal({4, 2})});
  check_gradients([](const auto& v) { return softmax(expand(v[0], {3, 4})); },
                  {draw.normal({3, 1})});
  check_gradients([](const auto& v) { return softmax(v[0]); }, {draw.normal({0, 5})});
  check_gradients([](const auto& v) { return softmax(v[0]); }, {draw.normal({2, 0})});
}

TEST_CASE("derivatives of embedding") {
  Draw draw;
  const DType dtype = GENERATE(i32, i64);
  INFO("ids " << dtype << ", seed " << draw.seed);
  const auto f = [](const std::vector<Tensor>& v) { return embedding(v[0], v[1]); };
  check_gradients(f, {draw.normal({5, 3}), draw.indices({2, 4}, 5, dtype)});
  check_gradients(f, {draw.normal({5, 3}), draw.indices({0}, 5, dtype)});
  check_gradients([](const auto& v) { return embedding(behind(v[0]), v[1]); },
                  {draw.normal({5, 3}), draw.indices({4}, 5, dtype)});
  check_gradients(
      [](const auto& v) { return embedding(transpose(v[0], 0, 1), transpose(v[1], 0, 1)); },
      {draw.normal({3, 5}), draw.indices({2, 4}, 5, dtype)});
  check_gradients(  // tied: both uses add to one place
      [](const auto& v) { return linear(embedding(v[0], v[1]), v[0]); },
      {draw.normal({5, 3}), draw.indices({4}, 5, dtype)});
}

TEST_CASE("derivatives of rms_norm and layer_norm") {
  Draw draw;
  const auto rms = [](const std::vector<Tensor>& v) { return rms_norm(v[0], v[1], 1e-5); };
  const auto layer = [](const std::vector<Tensor>& v) {
    return layer_norm(v[0], v[1], v[2], 1e-5);
  };
  // 70 rows are more than one block of the sums over rows.
  for (const Shape& x : {Shape{4, 6}, Shape{2, 3, 6}, Shape{6}, Shape{0, 6}, Shape{70, 6}}) {
    INFO("x " << x << ", seed " << draw.seed);
    check_gradients(rms, {draw.normal(x), draw.normal({6})});
    check_gradients(layer, {draw.normal(x), draw.normal({6}), draw.normal({6})});
  }
  INFO("seed " << draw.seed);
  check_gradients(
      [](const auto& v) {
        return rms_norm(transpose(v[0], 0, 1), reshape(slice(v[1], 1, 0, 1), {4}), 1e-5);
      },
      {draw.normal({4, 3}), draw.normal({4, 2})});
  check_gradients(
      [](const auto& v) {
        return layer_norm(expand(v[0], {3, 4}), reshape(slice(v[1], 1, 0, 1), {4}),
                          reshape(slice(v[1], 1, 1, 2), {4}), 1e-5);
      },
      {draw.normal({4}), draw.normal({4, 2})});
  check_gradients([](const auto& v) { return rms_norm(v[0], behind(v[1]), 1e-5); },
                  {draw.normal({3, 4}), draw.normal({4})});
  check_gradients([](const auto& v) { return layer_norm(v[0], behind(v[1]), v[2], 1e-5); },
                  {draw.normal({3, 4}), draw.normal({4}), draw.normal({4})});
  check_gradients([](const auto& v) { return layer_norm(v[0], v[1], behind(v[2]), 1e-5); },
                  {draw.normal({3, 4}), draw.normal({4}), draw.normal({4})});
}

TEST_CASE("derivatives of the norms of a sum, by either result") {
  Draw draw;
  const Tensor mix = draw.normal({6});
  const auto rms = [&](const std::vector<Tensor>& v) {
    const auto [sum, norm] = add_rms_norm(v[0], v[1], v[2], 1e-5);
    return mul(sum, mix) + norm;
  };
  const auto layer = [&](const std::vector<Tensor>& v) {
    const auto [sum, norm] = add_layer_norm(v[0], v[1], v[2], v[3], 1e-5);
    return mul(sum, mix) + norm;
  };
  for (const Shape& x : {Shape{4, 6}, Shape{2, 3, 6}, Shape{0, 6}, Shape{70, 6}}) {
    INFO("x " << x << ", seed " << draw.seed);
    check_gradients(rms, {draw.normal(x), draw.normal(x), draw.normal({6})});
    check_gradients(layer, {draw.normal(x), draw.normal(x), draw.normal({6}), draw.normal({6})});
  }
  check_gradients(
      [](const auto& v) {
        return add_rms_norm(transpose(v[0], 0, 1), transpose(v[1], 0, 1), v[2], 1e-5).norm;
      },
      {draw.normal({6, 4}), draw.normal({6, 4}), draw.normal({6})});
}

TEST_CASE("a sum takes the place of a residual that nobody else sees") {
  Draw draw;
  const Tensor x = draw.normal({4, 6}), weight = draw.normal({6}), residual = draw.normal({4, 6});
  Tensor given = residual + 0.0;
  const void* const place = given.data();
  const Tensor kept = add_rms_norm(x, residual, weight, 1e-5).sum;
  const Tensor moved = add_rms_norm(x, std::move(given), weight, 1e-5).sum;
  REQUIRE(kept.data() != residual.data());
  REQUIRE(moved.data() == place);
  REQUIRE_THROWS_AS(add_rms_norm(x, draw.normal({3, 6}), weight, 1e-5), ContractError);
}

TEST_CASE("derivatives of norms whose weight or bias is a constant") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor weight = draw.normal({4}), bias = draw.normal({4}), x = draw.normal({3, 4});
  check_gradients([&](const auto& v) { return rms_norm(v[0], weight, 1e-5); }, {x});
  check_gradients([&](const auto& v) { return layer_norm(v[0], weight, v[1], 1e-5); }, {x, bias});
  check_gradients([&](const auto& v) { return layer_norm(v[0], v[1], bias, 1e-5); }, {x, weight});
  check_gradients([&](const auto& v) { return layer_norm(x, v[0], v[1], 1e-5); }, {weight, bias});
}

TEST_CASE("derivatives of norms without weight or bias") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor mix = draw.normal({6});
  for (const Shape& x : {Shape{4, 6}, Shape{0, 6}, Shape{70, 6}}) {
    check_gradients([](const auto& v) { return rms_norm(v[0], {}, 1e-5); }, {draw.normal(x)});
    check_gradients([](const auto& v) { return layer_norm(v[0], {}, {}, 1e-5); }, {draw.normal(x)});
    check_gradients([](const auto& v) { return layer_norm(v[0], v[1], {}, 1e-5); },
                    {draw.normal(x), draw.normal({6})});
    check_gradients([](const auto& v) { return layer_norm(v[0], {}, v[1], 1e-5); },
                    {draw.normal(x), draw.normal({6})});
    check_gradients(
        [&](const auto& v) {
          const auto [sum, norm] = add_layer_norm(v[0], v[1], {}, {}, 1e-5);
          return mul(add_rms_norm(sum, norm, {}, 1e-5).norm, mix);
        },
        {draw.normal(x), draw.normal(x)});
  }
}

TEST_CASE("derivatives of rope") {
  Draw draw;
  INFO("seed " << draw.seed);
  const RopeTables tables = RopeTables::make(7, 4, 10000, draw.device);
  const auto f = [&](const std::vector<Tensor>& v) { return rope(v[0], tables); };
  check_gradients(f, {draw.normal({2, 3, 2, 4})});
  check_gradients(f, {draw.normal({1, 7, 1, 4})});
  check_gradients(f, {draw.normal({2, 0, 2, 4})});
  check_gradients([&](const auto& v) { return rope(permute(v[0], {0, 2, 1, 3}), tables); },
                  {draw.normal({2, 2, 3, 4})});
  check_gradients([&](const auto& v) { return rope(transpose(v[0], 2, 3), tables); },
                  {draw.normal({2, 3, 4, 2})});
  check_gradients([&](const auto& v) { return rope(slice(v[0], 2, 1, 3), tables); },
                  {draw.normal({1, 3, 4, 4})});
}

TEST_CASE("rope of the first heads leaves the others, and lies where its operand did") {
  Draw draw;
  INFO("seed " << draw.seed);
  const RopeTables tables = RopeTables::make(7, 4, 10000, draw.device);
  for (const std::int64_t heads : {0, 2, 3})
    check_gradients([&](const auto& v) { return rope(v[0], tables, heads); },
                    {draw.normal({2, 3, 3, 4})});
  check_gradients([&](const auto& v) { return rope(transpose(v[0], 2, 3), tables, 1); },
                  {draw.normal({2, 3, 4, 2})});
  const Tensor x = draw.normal({2, 3, 5, 4});
  const auto expected = cat({rope(slice(x, 2, 0, 3), tables), slice(x, 2, 3, 5)}, 2);
  const auto before = x.to_vector<double>();
  CHECK(rope(x, tables, 3).to_vector<double>() == expected.to_vector<double>());
  CHECK(x.to_vector<double>() == before);
  Tensor given = mul(x, 1);
  const void* const place = given.data();
  const Tensor y = rope(std::move(given), tables, 3);
  CHECK(y.data() == place);
  CHECK(y.to_vector<double>() == expected.to_vector<double>());

  // The gradient, too, unless somebody else sees it: here the other side of the sum.
  Tensor leaf = x.detach(), other = x.detach();
  leaf.require_grad(), other.require_grad();
  sum(square(rope(mul(leaf, 1), tables, 3) + other)).backward();
  const Tensor g = mul(expected + x, 2);
  CHECK(other.grad().to_vector<double>() == g.to_vector<double>());
  Tensor alone = x.detach();
  alone.require_grad();
  rope(mul(alone, 1), tables, 3).backward(g);
  CHECK(leaf.grad().to_vector<double>() == alone.grad().to_vector<double>());
  CHECK_THROWS_AS(rope(x, tables, 6), ContractError);
  CHECK_THROWS_AS(rope(x, tables, -1), ContractError);
}

TEST_CASE("derivatives of causal_attention") {
  Draw draw;
  const auto f = [](const std::vector<Tensor>& v) { return causal_attention(v[0], v[1], v[2]); };
  struct Case {
    std::int64_t batch, length, heads, kv_heads, dim;
  };
  for (const Case& c :
       {Case{2, 3, 2, 2, 4}, Case{1, 4, 4, 2, 2}, Case{2, 5, 3, 1, 3}, Case{1, 1, 2, 1, 4},
        Case{2, 0, 2, 1, 4}, Case{0, 3, 2, 1, 4}, Case{1, 70, 1, 1, 2}}) {
    const Shape q{c.batch, c.length, c.heads, c.dim}, k = q.with(2, c.kv_heads);
    INFO("q " << q << ", k " << k << ", seed " << draw.seed);
    check_gradients(f, {draw.normal(q), draw.normal(k), draw.normal(k)});
  }
  INFO("seed " << draw.seed);
  // Views of one fused projection, and tensors stored head by head.
  check_gradients(
      [](const auto& v) {
        return causal_attention(slice(v[0], 2, 0, 4), slice(v[0], 2, 4, 6), slice(v[0], 2, 6, 8));
      },
      {draw.normal({2, 3, 8, 2})});
  check_gradients(
      [](const auto& v) {
        return causal_attention(permute(v[0], {0, 2, 1, 3}), permute(v[1], {0, 2, 1, 3}),
                                expand(v[2], {2, 3, 2, 4}));
      },
      {draw.normal({2, 2, 3, 4}), draw.normal({2, 2, 3, 4}), draw.normal({3, 1, 4})});
}

TEST_CASE(
    "attention of one projection has the values and derivatives of its slices, in one operation") {
  struct Names final : Observer {
    void launched(StreamId, Tick, const Op& op) override { seen.emplace_back(op.name); }
    std::vector<std::string> seen;
  };
  Draw draw;
  INFO("seed " << draw.seed);
  const std::int64_t B = 2, T = 70, H = 4, K = 2, D = 8;
  const auto slices = [&](const Tensor& x) {
    return causal_attention(slice(x, 2, 0, H), slice(x, 2, H, H + K),
                            slice(x, 2, H + K, H + 2 * K));
  };
  for (const DType dtype : {f32, bf16, f64}) {
    const Tensor data = raw::cast(draw.normal({B, T, H + 2 * K, D}), dtype),
                 gradient = raw::cast(draw.normal({B, T, H, D}), dtype);
    // o, its gradient at the projection, and what backward launched
    const auto run = [&](const auto& attention) {
      const Tensor x = raw::add(data, Tensor::zeros({}, dtype, draw.device)).require_grad();
      const Tensor y = attention(x);
      Names names;
      draw.device.context().add_observer(names);
      y.backward(gradient);
      draw.device.context().remove_observer(names);
      const auto values = [](const Tensor& t) { return raw::cast(t, f64).to_vector<double>(); };
      return std::tuple(values(y), values(x.grad()), names.seen);
    };
    const auto [o, dx, one] = run([&](const Tensor& x) { return causal_attention(x, K); });
    const auto [o_of_slices, dx_of_slices, many] = run(slices);
    CHECK(o == o_of_slices);
    CHECK(dx == dx_of_slices);
    CHECK(one.front() == "attention_backward");
    CHECK(std::ranges::count(one, "fill") == 0);
    CHECK(many.size() > one.size() + 6);
  }
  const auto f = [](const std::vector<Tensor>& v) { return causal_attention(v[0], 1); };
  check_gradients(f, {draw.normal({2, 5, 4, 3})});
  check_gradients(f, {draw.normal({1, 1, 3, 2})});
  check_gradients(f, {draw.normal({2, 0, 3, 2})});
  check_gradients([](const auto& v) { return causal_attention(permute(v[0], {0, 2, 1, 3}), 2); },
                  {draw.normal({1, 6, 3, 2})});
  CHECK_THROWS_AS(causal_attention(draw.normal({2, 5, 5, 3}), 2), ContractError);  // H is 1
  CHECK_THROWS_AS(causal_attention(draw.normal({2, 5, 2, 3}), 1), ContractError);  // H is 0
  CHECK_THROWS_AS(causal_attention(draw.normal({5, 4, 3}), 1), ContractError);
}

TEST_CASE("derivatives of dropout with a given draw") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const double p : {0.0, 0.3, 1.0}) {
    const auto f = [&](const std::vector<Tensor>& v) { return dropout(v[0], p, draw.seed, 5); };
    check_gradients(f, {draw.normal({4, 5})});
    check_gradients(f, {draw.normal({0, 5})});
    check_gradients([&](const auto& v) { return dropout(transpose(v[0], 0, 1), p, draw.seed, 5); },
                    {draw.normal({3, 4})});
  }
}

TEST_CASE("derivatives of cross_entropy") {
  Draw draw;
  const DType dtype = GENERATE(i32, i64);
  INFO("targets " << dtype << ", seed " << draw.seed);
  const auto f = [](const std::vector<Tensor>& v) { return cross_entropy(v[0], v[1]); };
  check_gradients(f, {draw.normal({4, 5}), draw.indices({4}, 5, dtype)});
  check_gradients(f, {draw.normal({1, 1}), draw.indices({1}, 1, dtype)});
  check_gradients([](const auto& v) { return cross_entropy(transpose(v[0], 0, 1), v[1]); },
                  {draw.normal({5, 4}), draw.indices({4}, 5, dtype)});
  check_gradients([](const auto& v) { return cross_entropy(v[0] * 2.0, v[1]) * 0.5; },
                  {draw.normal({4, 5}), draw.indices({4}, 5, dtype)});
  check_gradients(  // logits with a second user
      [](const auto& v) {
        const Tensor logits = v[0] * 2.0;
        return cross_entropy(logits, v[1]) + sum(logits * logits);
      },
      {draw.normal({4, 5}), draw.indices({4}, 5, dtype)});
}

TEST_CASE("gradients of a whole block are the same bits on every executor, for any threads",
          "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](const CpuOptions& options) {
    const Device device = Device::cpu(options);
    std::uint64_t key = seed;
    const auto parameter = [&](const Shape& shape) {
      return Tensor::normal(shape, 0, 0.3, ++key, f32, device).require_grad();
    };
    const std::int64_t tokens = 6, width = 16, vocab = 40;
    const RopeTables tables = RopeTables::make(tokens, 4, 10000, device);
    const Tensor table = parameter({vocab, width}), scale = parameter({width}),
                 qkv = parameter({2 * width, width}), out = parameter({width, width}),
                 up = parameter({3 * width, width}), down = parameter({width, 3 * width / 2});
    const Tensor ids = Tensor::arange(2 * tokens, i64, device);
    const Tensor x = embedding(table, reshape(ids, {2, tokens}));
    const Tensor heads = reshape(linear(rms_norm(x, scale, 1e-5), qkv), {2, tokens, 8, 4});
    const Tensor attended =
        causal_attention(rope(slice(heads, 2, 0, 4), tables), rope(slice(heads, 2, 4, 6), tables),
                         slice(heads, 2, 6, 8));
    const Tensor h = x + linear(reshape(attended, {2, tokens, width}), out);
    const Tensor wide = linear(h, up);
    const Tensor y =
        h + linear(dropout(swiglu(slice(wide, 2, 0, 24), slice(wide, 2, 24, 48)), 0.1, 3, 4), down);
    cross_entropy(linear(reshape(y, {-1, width}), table), ids).backward();  // tied
    std::vector<std::vector<float>> gradients;
    for (const Tensor& p : {table, scale, qkv, out, up, down})
      gradients.push_back(p.grad().to_vector<float>());
    return gradients;
  };
  const auto expected = run({.executor = ExecutorKind::inlined});
  for (const int threads : {1, 2, 3})
    CHECK(run({.executor = ExecutorKind::threaded, .threads = threads}) == expected);
  for (std::uint64_t s = 0; s < 5; ++s)
    CHECK(run({.executor = testing::shuffled(seed + s)}) == expected);
}
