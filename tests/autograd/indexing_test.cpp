// x[...] as a list, and writing at indices: values by hand, derivatives by differences.
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::any_device;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

using List = std::vector<std::int64_t>;
List whole(const Tensor& x) { return raw::contiguous(x).to_vector<std::int64_t>(); }

}  // namespace

TEST_CASE("an index list reads as Python's does") {
  const Device device = any_device();
  const Tensor x = reshape(Tensor::arange(24, i64, device), {2, 3, 4});
  const auto places = [&](const List& v, const Shape& shape) {
    return Tensor::from(v, shape, device);
  };
  CHECK(whole(index(x, {1, -1})) == List{20, 21, 22, 23});
  CHECK(whole(index(x, {1, 2, 3})) == List{23});
  CHECK(whole(index(x, {Range{}, 0, Range{1, {}, 2}})) == List{1, 3, 13, 15});
  CHECK(whole(index(x, {0, Range{-1, 9}, Range{{}, -3}})) == List{8});
  CHECK(index(x, {Range{3, 1}}).shape() == Shape{0, 3, 4});
  CHECK(whole(index(x, {ellipsis, 2})) == List{2, 6, 10, 14, 18, 22});
  CHECK(index(x, {0, new_axis, ellipsis, new_axis}).shape() == Shape{1, 3, 4, 1});
  const Tensor full = reshape(x, {1, 1, 1, 2, 3, 4});  // as many as there may be
  CHECK(index(full, {new_axis, 0, ellipsis, 3}).shape() == Shape{1, 1, 1, 2, 3});
  CHECK(index(x, {}).shape() == x.shape());
  CHECK(index(x, {1}).storage() == x.storage());
  // One tensor, in place of its dimension; negative places count from the end.
  const Tensor rows = places({2, -1, 0, 1}, {2, 2});
  CHECK(index(x, {Range{}, rows}).shape() == Shape{2, 2, 2, 4});
  CHECK(whole(index(x, {0, rows, 0})) == List{8, 8, 0, 4});
  // Two beside each other, broadcast; then with a dimension between them, which stands behind.
  const Tensor i = places({0, 2}, {2, 1}), j = places({3, 0, 1}, {3});
  CHECK(whole(index(x, {1, i, j})) == List{15, 12, 13, 23, 20, 21});
  CHECK(index(x, {Range{}, i, j}).shape() == Shape{2, 2, 3});
  const Tensor first = places({1, 0, 1}, {3});
  CHECK(index(x, {first, Range{}, j}).shape() == Shape{3, 3});
  CHECK(whole(index(x, {first, Range{}, j})) == List{15, 19, 23, 0, 4, 8, 13, 17, 21});
  CHECK(whole(index(x, {places({1}, {}), 0, 0})) == List{12});
  // Out of range in either reads as 0 of integers.
  CHECK(whole(index(x, {places({0, 2}, {2}), places({3, 0}, {2}), 0})) == List{0, 0});
  CHECK_THROWS_WITH(index(x, {2}), Catch::Contains("position 2 is outside dimension 0"));
  CHECK_THROWS_WITH(index(x, {0, 0, 0, 0}), Catch::Contains("4 dimensions"));
  CHECK_THROWS_WITH(index(x, {Range{0, 2, -1}}), Catch::Contains("flip"));
  CHECK_THROWS_WITH(index(x, {x > 3}), Catch::Contains("masked_fill"));
}

TEST_CASE("writing at indices gives a new tensor") {
  const Device device = any_device();
  const Tensor x = Tensor::zeros({2, 3}, i64, device);
  const auto of = [&](const List& v, const Shape& shape) { return Tensor::from(v, shape, device); };
  const Tensor rows = of({1, -1, 0}, {3}), cols = of({0, 2, 1}, {3}), ten = of({10}, {1});
  CHECK(whole(index_put(x, {rows, cols}, of({1, 2, 3}, {3}))) == List{0, 3, 0, 1, 0, 2});
  CHECK(whole(index_put(x, {of({1, 1}, {2})}, ten, Put::add)) == List{0, 0, 0, 20, 20, 20});
  CHECK(whole(index_copy(x, 1, of({2, 0}, {2}), of({1, 2, 3, 4}, {2, 2}))) ==
        List{2, 0, 1, 4, 0, 3});
  CHECK(whole(index_add(x, 0, of({1, 1}, {2}), of({1, 2, 3, 4, 5, 6}, {2, 3}))) ==
        List{0, 0, 0, 5, 7, 9});
  // An index smaller than x, a source larger than the index.
  const Tensor corner = of({2, 1}, {1, 2});
  CHECK(whole(scatter(x, 1, corner, of({1, 2, 3, 4, 5, 6}, {2, 3}))) == List{0, 2, 1, 0, 0, 0});
  CHECK(whole(scatter(x, 0, of({1}, {1, 1}), 9)) == List{0, 0, 0, 9, 0, 0});
  CHECK(whole(scatter_add(x, 1, of({0, 0}, {1, 2}), of({3, 4}, {1, 2}))) == List{7, 0, 0, 0, 0, 0});
  CHECK(whole(x) == List(6));
  CHECK_THROWS_WITH(gather(x, 0, of({0, 0, 0, 0}, {1, 4})),
                    Catch::Contains("gather: index [1, 4] is larger"));
  CHECK_THROWS_WITH(index_put(x, {rows, cols, rows}, ten), Catch::Contains("3 indices"));
  CHECK_THROWS_AS(index_copy(x, 0, rows, x), ContractError);
}

TEST_CASE("derivatives of index lists and of writing at indices") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({3, 4, 2});
  const Tensor a = draw.indices({2, 1}, 3, i64), b = draw.indices({3}, 2, i32),
               apart = Tensor::from(List{2, 0}, {2}, draw.device);
  check_gradients([&](const auto& v) { return index(v[0], {1, Range{0, 4, 3}}); }, {x});
  check_gradients([&](const auto& v) { return index(v[0], {a, Range{}, b}); }, {x});
  check_gradients([&](const auto& v) { return index(v[0], {ellipsis, b, new_axis}); }, {x});
  check_gradients([&](const auto& v) { return index_put(v[0], {apart}, v[1]); },
                  {x, draw.normal({4, 1})});
  check_gradients([&](const auto& v) { return index_put(v[0], {a, b}, v[1], Put::add); },
                  {draw.normal({3, 2}), draw.normal({3})});
  check_gradients([&](const auto& v) { return index_copy(v[0], 1, apart, v[1]); },
                  {x, draw.normal({3, 2, 2})});
  const Tensor repeated = draw.indices({5}, 3, i64);
  check_gradients([&](const auto& v) { return index_add(v[0], 0, repeated, v[1]); },
                  {x, draw.normal({5, 4, 2})});
  const Tensor column = reshape(apart, {2, 1, 1});
  check_gradients([&](const auto& v) { return gather(v[0], 0, column); }, {x});
  check_gradients([&](const auto& v) { return scatter(v[0], 0, column, v[1]); },
                  {x, draw.normal({2, 3, 1})});
  check_gradients([&](const auto& v) { return scatter_add(v[0], 0, column, v[1]); },
                  {x, draw.normal({2, 1, 2})});
  check_gradients([&](const auto& v) { return scatter(v[0], 0, column, 2.0); }, {x});
  const Tensor none = Tensor::from(List{}, {0}, draw.device);
  check_gradients([&](const auto& v) { return index(v[0], {none}); }, {x});
  check_gradients([&](const auto& v) { return index_put(v[0], {none}, v[1]); },
                  {x, draw.normal({1, 2})});
}
