// Derivatives of views, joins, indices and products.
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

TEST_CASE("derivatives of views") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({2, 3, 4});
  check_gradients([](const auto& v) { return reshape(v[0], {4, -1}); }, {x});
  check_gradients([](const auto& v) { return reshape(transpose(v[0], 0, 2), {6, 4}); }, {x});
  check_gradients([](const auto& v) { return transpose(v[0], 0, -1); }, {x});
  check_gradients([](const auto& v) { return contiguous(transpose(v[0], 0, -1)); }, {x});
  check_gradients([](const auto& v) { return permute(v[0], {1, -1, 0}); }, {x});
  check_gradients([](const auto& v) { return slice(v[0], 1, 1, 3); }, {x});
  check_gradients([](const auto& v) { return slice(transpose(v[0], 0, 1), -1, 1, 2); }, {x});
  check_gradients([](const auto& v) { return slice(v[0], 1, 2, 2); }, {x});
  check_gradients([](const auto& v) { return expand(v[0], {5, 2, 3, 4}); }, {x});
  check_gradients([](const auto& v) { return expand(v[0], {2, 3, 4}); }, {draw.normal({3, 1})});
  check_gradients([](const auto& v) { return expand(v[0], {0, 3}); }, {draw.normal({1, 3})});
  check_gradients([](const auto& v) { return expand(v[0], {2, 2}); }, {draw.normal({})});
  const Tensor none = draw.normal({2, 0, 3});
  check_gradients([](const auto& v) { return reshape(v[0], {0, 7}); }, {none});
  check_gradients([](const auto& v) { return permute(v[0], {2, 0, 1}); }, {none});
}

TEST_CASE("a slice's ends count from the back where they are negative, as in Python") {
  const Tensor x = Tensor::from({0, 1, 2, 3}, {4}, Device::cpu());
  // What Python's range(4)[begin:end:step] is.
  using List = std::vector<float>;
  CHECK(slice(x, 0, 0, -1).to_vector<float>() == List{0, 1, 2});
  CHECK(slice(x, 0, -3, -1).to_vector<float>() == List{1, 2});
  CHECK(slice(x, 0, -4, 4, 2).to_vector<float>() == List{0, 2});
  CHECK(slice(x, 0, -9, 2).to_vector<float>() == List{0, 1});
  CHECK(slice(x, 0, 1, 9).to_vector<float>() == List{1, 2, 3});
  for (const auto& [begin, end] : {std::pair{3, 1}, {-1, -3}, {0, -4}, {9, 12}, {-9, -7}})
    CHECK(slice(x, 0, begin, end).shape() == Shape{0});
  check_gradients([](const auto& v) { return slice(v[0], -1, -3, -1); }, {Draw().normal({2, 4})});
}

TEST_CASE("derivatives of further views") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({2, 3, 4});
  check_gradients([](const auto& v) { return flatten(v[0]); }, {x});
  check_gradients([](const auto& v) { return flatten(transpose(v[0], 0, 1), 1); }, {x});
  check_gradients([](const auto& v) { return squeeze(unsqueeze(v[0], 2)) * 2.0; }, {x});
  check_gradients([](const auto& v) { return squeeze(unsqueeze(v[0], -1), 3); }, {x});
  check_gradients([](const auto& v) { return slice(v[0], 2, 0, 4, 3); }, {x});
  check_gradients([](const auto& v) { return select(transpose(v[0], 0, 2), 1, -1); }, {x});
  check_gradients([](const auto& v) { return expand(unsqueeze(v[0], 0), {2, -1, -1, -1}); }, {x});
  for (const int offset : {0, 2, -1})
    check_gradients([&](const auto& v) { return diagonal(v[0], offset, -1, 1); }, {x});
  check_gradients([](const auto& v) { return diag(v[0], 1) * diag(v[0], 1); }, {draw.normal({3})});
  check_gradients([](const auto& v) { return diag(v[0], -1); }, {draw.normal({3, 2})});
  check_gradients(
      [](const auto& v) {
        const std::vector<Tensor> parts = chunk(v[0], 3, -1);
        return parts.at(0) * parts.at(1);
      },
      {draw.normal({2, 6})});
}

TEST_CASE("derivatives of copies whose elements move") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({2, 3}), none = draw.normal({0, 3});
  for (const Tensor& t : {x, none}) {
    check_gradients([](const auto& v) { return repeat(v[0], {2, 1, 3}); }, {t});
    check_gradients([](const auto& v) { return repeat(v[0], {0, 3}); }, {t});
    check_gradients([](const auto& v) { return repeat_interleave(v[0], 2, 0); }, {t});
    check_gradients([](const auto& v) { return flip(transpose(v[0], 0, 1), {0, -1}); }, {t});
    check_gradients([](const auto& v) { return roll(v[0], 4, 1); }, {t});
    check_gradients([](const auto& v) { return roll(v[0], -1, 0); }, {t});
    check_gradients([](const auto& v) { return pad(v[0], {1, 2}, 3); }, {t});
    check_gradients([](const auto& v) { return pad(v[0], {-1, 1, 2, 0}); }, {t});
    check_gradients([](const auto& v) { return tril(v[0]); }, {t});
    check_gradients([](const auto& v) { return triu(transpose(v[0], 0, 1), -1); }, {t});
  }
}

TEST_CASE("derivatives of cat, stack and split") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor a = draw.normal({2, 3}), b = draw.normal({4, 3}), c = draw.normal({0, 3}),
               t = draw.normal({3, 2});
  check_gradients(
      [](const auto& v) { return cat(std::vector{v[0], v[1], v[2], transpose(v[3], 0, 1)}, 0); },
      {a, b, c, t});
  check_gradients([](const auto& v) { return cat(std::vector{v[0], v[0], v[1]}, -1); },
                  {a, draw.normal({2, 1})});
  for (const int dim : {0, 1, 2, -1})
    check_gradients(
        [&](const auto& v) { return stack(std::vector{v[0], transpose(v[1], 0, 1)}, dim); },
        {a, t});
  check_gradients([](const auto& v) { return stack(std::vector{v[0], v[1]}, 0); },
                  {draw.normal({}), draw.normal({})});
  check_gradients(
      [](const auto& v) {
        const std::vector<Tensor> parts = split(v[0], 3, 1);
        return parts.at(0) * parts.at(1) + expand(parts.at(2), {2, 3});
      },
      {draw.normal({2, 7})});
}

TEST_CASE("derivatives of index operations, repeats among the indices") {
  Draw draw;
  const DType dtype = GENERATE(i32, i64);
  INFO("index " << dtype << ", seed " << draw.seed);
  const Tensor x = draw.normal({3, 4, 2});
  for (const int dim : {0, 1, -1}) {
    const std::int64_t n = x.size(dim);
    const Tensor rows = draw.indices({6}, n, dtype), none = draw.indices({0}, n, dtype);
    check_gradients([&](const auto& v) { return index_select(v[0], dim, v[1]); }, {x, rows});
    check_gradients([&](const auto& v) { return index_select(v[0], dim, v[1]); }, {x, none});
    const Shape shape = x.shape().with(normalize_dim(dim, 3), 5);
    const Tensor at = draw.indices(shape, n, dtype);
    check_gradients([&](const auto& v) { return gather(v[0], dim, v[1]); }, {x, at});
    check_gradients([&](const auto& v) { return scatter_add(v[0], dim, v[1], v[2]); },
                    {x, at, draw.normal(shape)});
    check_gradients([&](const auto& v) { return scatter(v[0], dim, v[1], v[2]); },
                    {x, at, draw.normal(shape)});
  }
  const Tensor rows = draw.indices({3}, 4, dtype);
  check_gradients([&](const auto& v) { return index_select(transpose(v[0], 0, 1), 0, v[1]); },
                  {x, rows});
  const Tensor at = draw.indices({2, 3}, 4, dtype);
  check_gradients(
      [&](const auto& v) {
        return scatter_add(transpose(v[0], 0, 1), 1, v[1], transpose(v[2], 0, 1));
      },
      {draw.normal({4, 2}), at, draw.normal({3, 2})});
}

TEST_CASE("derivatives of matmul") {
  Draw draw;
  struct Case {
    Shape a, b;
    bool flip_a, flip_b;
  };
  const Case cases[] = {
      {{3, 4}, {4, 2}, false, false},       {{4, 3}, {4, 2}, true, false},
      {{3, 4}, {2, 4}, false, true},        {{4, 3}, {2, 4}, true, true},
      {{1, 4}, {4, 1}, false, false},       {{2, 3, 4}, {4, 2}, false, false},
      {{2, 2, 3, 4}, {2, 4}, false, true},  {{2, 4, 3}, {4, 2}, true, false},
      {{2, 3, 4}, {2, 4, 2}, false, false}, {{2, 4, 3}, {2, 2, 4}, true, true},
      {{3, 4}, {2, 4, 2}, false, false},    {{2, 1, 3, 4}, {3, 4, 2}, false, false},
      {{1, 3, 4}, {2, 4, 2}, false, false}, {{2, 3, 4}, {1, 4, 2}, false, false},
      {{0, 4}, {4, 2}, false, false},       {{3, 0}, {0, 2}, false, false},
      {{3, 4}, {4, 0}, false, false},       {{2, 3, 0}, {0, 2}, false, false},
      {{0, 3, 4}, {4, 2}, false, false},    {{0, 3, 4}, {0, 4, 2}, false, false},
      {{2, 0, 4}, {2, 4, 3}, false, false}};
  for (const Case& c : cases) {
    INFO(c.a << " and " << c.b << (c.flip_a ? ", left transposed" : "")
             << (c.flip_b ? ", right transposed" : "") << ", seed " << draw.seed);
    check_gradients(
        [&](const auto& v) {
          return matmul(c.flip_a ? transpose(v[0], -1, -2) : v[0],
                        c.flip_b ? transpose(v[1], -1, -2) : v[1]);
        },
        {draw.normal(c.a), draw.normal(c.b)});
  }
  INFO("seed " << draw.seed);
  check_gradients([](const auto& v) { return matmul(slice(v[0], 1, 1, 4), expand(v[1], {3, 2})); },
                  {draw.normal({2, 5}), draw.normal({3, 1})});
  check_gradients([](const auto& v) { return matmul(permute(v[0], {1, 0, 2}), v[1]); },
                  {draw.normal({3, 2, 4}), draw.normal({2, 4, 2})});
  check_gradients([](const auto& v) { return matmul(v[0], v[0]); }, {draw.normal({3, 3})});
}

TEST_CASE("derivatives of views and indices worked by hand") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto leaf = [&] {
    return Tensor::from(std::vector<double>{1, 2, 3, 4, 5, 6}, {2, 3}, device).require_grad();
  };
  // Element [i, j] of the view is x[j, i + 1] and weighs w[i, j]; what the slice leaves out gets 0.
  const Tensor x = leaf(), w = Tensor::from(std::vector<double>{1, 2, 3, 4}, {2, 2}, device);
  sum(slice(transpose(x, 0, 1), 0, 1, 3) * w).backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{0, 1, 3, 0, 2, 4});
  // A row that is taken twice gets the sum.
  const Tensor y = leaf(), rows = Tensor::from(std::vector<std::int32_t>{1, 0, 1}, {3}, device);
  sum(index_select(y, 0, rows)).backward();
  CHECK(y.grad().to_vector<double>() == std::vector<double>{1, 1, 1, 2, 2, 2});
}

TEST_CASE("a source that is not written, or not last, has no gradient") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto slope = [&](const std::vector<std::int64_t>& places, const auto& f) {
    const auto n = static_cast<std::int64_t>(places.size());
    const Tensor index = Tensor::from(places, {n}, device);
    const Tensor x = Tensor::zeros({2}, f32, device);
    const Tensor source = Tensor::ones({n}, f32, device).require_grad();
    sum(f(x, index, source)).backward();
    return source.grad().template to_vector<float>();
  };
  const auto set = [](const Tensor& x, const Tensor& i, const Tensor& s) {
    return scatter(x, 0, i, s);
  };
  const auto copied = [](const Tensor& x, const Tensor& i, const Tensor& s) {
    return index_copy(x, 0, i, s);
  };
  const auto stored = [](const Tensor& x, const Tensor& i, const Tensor& s) {
    return index_put(x, {i}, s);
  };
  const auto added = [](const Tensor& x, const Tensor& i, const Tensor& s) {
    return index_add(x, 0, i, s);
  };
  const auto summed = [](const Tensor& x, const Tensor& i, const Tensor& s) {
    return scatter_add(x, 0, i, s);
  };
  using List = std::vector<float>;
  for (const std::int64_t outside : {-1, 2, 7}) {
    INFO("place " << outside);
    CHECK(slope({0, outside, 1}, set) == List{1, 0, 1});
    CHECK(slope({0, outside, 1}, copied) == List{1, 0, 1});
    CHECK(slope({0, outside, 1}, added) == List{1, 0, 1});
    CHECK(slope({0, outside, 1}, summed) == List{1, 0, 1});
  }
  CHECK(slope({0, 7, 1}, stored) == List{1, 0, 1});
  CHECK(slope({0, 0, 1}, set) == List{0, 1, 1});
  CHECK(slope({0, 0, 1}, copied) == List{0, 1, 1});
  CHECK(slope({0, 0, 1}, stored) == List{0, 1, 1});
  CHECK(slope({0, 0, 1}, added) == List{1, 1, 1});
}

TEST_CASE("a quotient by a number is that, and no product with its inverse") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::from(std::vector<double>{49, 0}, {2}, device);
  CHECK((x / 49.0).to_vector<double>() == std::vector<double>{1, 0});
  CHECK((x / 1e-310).to_vector<double>()[1] == 0);
  const Tensor n = Tensor::from(std::vector<std::int64_t>{7, -7}, {2}, device);
  CHECK((n / 2.0).to_vector<std::int64_t>() == std::vector<std::int64_t>{3, -3});
  CHECK_THROWS_WITH(n / 0.5, Catch::Matchers::Contains("div: the scalar 0.5 is no whole number"));
}

TEST_CASE("a dimension without elements splits into one piece, which joins again") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor none = Tensor::zeros({0, 3}, f32, device);
  CHECK(split(none, 2, 0).size() == 1);
  CHECK(cat(split(none, 2, 0), 0).shape() == Shape{0, 3});
}
