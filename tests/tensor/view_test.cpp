// Shapes, broadcasting and views: arithmetic without kernels, and the copies that views may need.
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

std::vector<View> all_views() {
  std::vector<View> out = same_shape_views();
  for (const View& v : odd_views()) out.push_back(v);
  return out;
}

}  // namespace

TEST_CASE("shapes know their size and strides and refuse what cannot be") {
  CHECK(Shape{}.numel() == 1);
  CHECK(Shape{2, 0, 3}.numel() == 0);
  CHECK(Shape{2, 0, 3}.strides() == Shape{3, 3, 1});
  CHECK(Shape{2, 3}.without(0) == Shape{3});
  CHECK(Shape{2, 3}.with(1, 7) == Shape{2, 7});
  CHECK(Shape{2, 3}.without(-2) == Shape{3});
  CHECK(Shape{2, 3}.with(-1, 7) == Shape{2, 7});
  CHECK_FALSE(Shape{2, 3} == Shape{2, 3, 1});
  CHECK(concat(Shape{2, 3}, " ", Shape{}) == "[2, 3] []");
  CHECK_THROWS_WITH((Shape{1, 2, 3, 4, 5, 6, 7}), Catch::Contains("at most 6 dimensions"));
  CHECK_THROWS_WITH((Shape{std::int64_t{1} << 40, std::int64_t{1} << 40}.numel()),
                    Catch::Contains("overflow"));
  CHECK_THROWS_AS((Shape{2, -1}.numel()), ContractError);
  CHECK(normalize_dim(-1, 3) == 2);
  CHECK_THROWS_WITH(normalize_dim(3, 3), Catch::Contains("dimension 3 is out of range"));
  CHECK_THROWS_AS(normalize_dim(-4, 3), ContractError);
}

TEST_CASE("a shape's negative index counts from the end, and one beyond it is refused") {
  Shape shape{2, 3, 4};
  for (int d = 0; d < 3; ++d) CHECK(shape[d - 3] == shape[d]);
  shape[-2] = 7;
  CHECK(shape == Shape{2, 7, 4});
  CHECK(shape.back() == 4);
  for (const int d : {-4, 3, kMaxDims, -1000}) {
    CHECK_THROWS_WITH(shape[d], Catch::Contains(concat("dimension ", d, " is out of range")));
    CHECK_THROWS_AS(std::as_const(shape)[d], ContractError);
    CHECK_THROWS_AS(shape.with(d, 1), ContractError);
    CHECK_THROWS_AS(shape.without(d), ContractError);
  }
  CHECK_THROWS_AS(Shape{}.back(), ContractError);
}

TEST_CASE("shapes broadcast by NumPy's rule") {
  CHECK(broadcast({2, 3}, {3}) == Shape{2, 3});
  CHECK(broadcast({2, 1, 3}, {4, 1}) == Shape{2, 4, 3});
  CHECK(broadcast({}, {2}) == Shape{2});
  CHECK(broadcast({1}, {0}) == Shape{0});
  CHECK(broadcast({0, 3}, {1, 1}) == Shape{0, 3});
  CHECK_THROWS_WITH(broadcast({2, 3}, {2}), Catch::Contains("[2, 3]") && Catch::Contains("[2]"));
  CHECK_THROWS_AS(broadcast({0}, {2}), ContractError);
}

TEST_CASE("views show the elements that their definition names") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : all_views())
    for (const DType dtype : {f32, bf16, i64, boolean}) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device);
      check_values(x.tensor, dtype, x.host);
      check_values(raw::contiguous(x.tensor), dtype, x.host);
      CHECK(raw::contiguous(x.tensor).is_contiguous());
    }
}

TEST_CASE("a view shares its storage and a contiguous tensor is its own copy") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::arange(24, f32, device);
  const Tensor y = raw::reshape(x, {2, 3, 4});
  CHECK(y.storage() == x.storage());
  CHECK(raw::transpose(y, 0, 2).storage() == x.storage());
  CHECK(raw::slice(y, 1, 1, 3).data() == x.data() + 4 * 4);
  CHECK(raw::contiguous(y).data() == x.data());
  CHECK(raw::contiguous(raw::slice(y, 0, 1, 2)).storage() == x.storage());
  CHECK(raw::contiguous(raw::transpose(y, 0, 1)).storage() != x.storage());
}

TEST_CASE("reshape keeps the order of elements, by a view where the layout allows it") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views())
    for (const Shape& shape :
         {Shape{24}, Shape{6, 4}, Shape{2, 12}, Shape{4, 3, 2}, Shape{2, 3, 2, 2},
          Shape{1, 2, 1, 3, 4, 1}, Shape{8, 3}, Shape{-1, 4}, Shape{2, -1}, Shape{3, -1, 2}}) {
      INFO(view.name << " to " << shape << ", seed " << draw.seed);
      const Pair x = draw(view, f32, device);
      const Tensor y = raw::reshape(x.tensor, shape);
      check_values(y, f32, {y.shape(), x.host.values});
    }
  // Which of these need a copy follows from the strides.
  const Tensor x = raw::reshape(Tensor::arange(24, f32, device), {2, 3, 4});
  const auto is_view = [&](const Tensor& t, const Shape& shape) {
    return raw::reshape(t, shape).storage() == x.storage();
  };
  CHECK(is_view(x, {6, 4}));
  CHECK(is_view(raw::slice(x, 1, 0, 2), {2, 2, 2, 2}));
  CHECK(is_view(raw::slice(x, 1, 0, 2), {2, 8}));
  CHECK_FALSE(is_view(raw::slice(x, 1, 0, 2), {16}));
  CHECK(is_view(raw::transpose(x, 0, 1), {3, 2, 2, 2}));
  CHECK_FALSE(is_view(raw::transpose(x, 0, 1), {6, 4}));
  CHECK(is_view(raw::expand(raw::slice(x, 0, 0, 1), {5, 3, 4}), {5, 12}));
}

TEST_CASE("reshapes of nothing, of one element, and refusals") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor none = Tensor::zeros({2, 0, 3}, f32, device), one = Tensor::ones({}, f32, device),
               six = Tensor::ones({6}, f32, device);
  CHECK(raw::reshape(none, {0, 5}).shape() == Shape{0, 5});
  CHECK(raw::reshape(none, {4, -1}).shape() == Shape{4, 0});
  CHECK(raw::reshape(one, {1, 1}).shape() == Shape{1, 1});
  CHECK_THROWS_WITH(raw::reshape(six, {4}), Catch::Contains("[6]") && Catch::Contains("[4]"));
  CHECK_THROWS_WITH(raw::reshape(six, {-1, 4}), Catch::Contains("does not fit"));
  CHECK_THROWS_WITH(raw::reshape(six, {-1, -1}), Catch::Contains("more than one size"));
  CHECK_THROWS_AS(raw::reshape(none, {-1, 0}), ContractError);
}

TEST_CASE("views out of range are refused with the numbers") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  CHECK_THROWS_WITH(raw::slice(x, 1, 2, 4), Catch::Contains("[2, 4)") && Catch::Contains("[2, 3]"));
  CHECK_THROWS_AS(raw::slice(x, 1, 2, 1), ContractError);
  CHECK_THROWS_AS(raw::slice(x, 2, 0, 1), ContractError);
  CHECK_THROWS_WITH(raw::expand(x, {3, 3}), Catch::Contains("[2, 3]") && Catch::Contains("[3, 3]"));
  CHECK_THROWS_AS(raw::expand(x, {3}), ContractError);
  CHECK_THROWS_WITH(raw::permute(x, std::vector{0, 0}), Catch::Contains("named twice"));
  CHECK_THROWS_WITH(raw::permute(x, std::vector{0}), Catch::Contains("[2, 3]"));
}
