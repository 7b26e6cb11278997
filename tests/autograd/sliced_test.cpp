// Operations on a matrix slice by slice: against the same operations on all of it.
#include "tessera/autograd/sliced.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

// How ranks and slices cut a matrix: chunks of `chunk` rows, slices of `rows` rows of each.
struct Cut {
  std::int64_t chunk, rows;
};

// Calls f(slice, rows) for each slice of the matrix, with its history.
template <class F>
void for_each_slice(const Tensor& matrix, const Cut& cut, const F& f) {
  const std::int64_t all = matrix.size(0);
  for (std::int64_t begin = 0; begin < cut.chunk; begin += cut.rows) {
    const SliceRows rows{all, cut.chunk, begin, std::min(cut.rows, cut.chunk - begin)};
    std::vector<std::int32_t> ids;
    for (std::int64_t chunk = 0; chunk < all; chunk += cut.chunk)
      for (std::int64_t row = chunk + begin; row < chunk + begin + rows.rows && row < all; ++row)
        ids.push_back(static_cast<std::int32_t>(row));
    REQUIRE(rows.count() == static_cast<std::int64_t>(ids.size()));
    f(index_select(matrix, 0, Tensor::from(ids, {rows.count()}, matrix.device())), rows);
  }
}

template <class Op>
Tensor finished(Op op, const Tensor& matrix, const Cut& cut) {
  for_each_slice(matrix, cut,
                 [&](const Tensor& slice, const SliceRows& rows) { op.add(slice, rows); });
  return op.finish();
}

Cut any_cut() {  // of 7 rows
  return GENERATE(Cut{7, 7}, Cut{7, 3}, Cut{3, 1}, Cut{2, 2}, Cut{4, 3}, Cut{1, 1});
}

std::vector<double> numbers(const Tensor& t) { return raw::cast(t, f64).to_vector<double>(); }

}  // namespace

TEST_CASE("derivatives of operations slice by slice") {
  Draw draw;
  const Cut cut = any_cut();
  const DType dtype = GENERATE(i32, i64);
  INFO("seed " << draw.seed << ", chunks of " << cut.chunk << ", slices of " << cut.rows);
  check_gradients([&](const auto& v) { return finished(SlicedEmbedding(v[1]), v[0], cut); },
                  {draw.normal({7, 3}), draw.indices({2, 5}, 7, dtype)});
  check_gradients([&](const auto& v) { return finished(SlicedLinear(v[0]), v[1], cut); },
                  {draw.normal({2, 4, 3}), draw.normal({7, 3})});
  for (const std::int64_t most : {1, 20, 1000}) {
    const auto loss = [&](const auto& v) {
      return finished(SlicedCrossEntropy(v[0], v[2], most), v[1], cut) * 0.5;
    };
    check_gradients(loss, {draw.normal({6, 3}), draw.normal({7, 3}), draw.indices({6}, 7, dtype)});
    const Tensor x = draw.normal({6, 3}), matrix = draw.normal({7, 3}),
                 targets = draw.indices({6}, 7, dtype);
    check_gradients([&](const auto& v) { return loss(std::array{v[0], matrix, targets}); }, {x});
    check_gradients([&](const auto& v) { return loss(std::array{x, v[0], targets}); }, {matrix});
  }
}

// Rows are copied, and columns computed, as they are without slices. A loss sums its exponentials
// part by part: in f32 two orders of a sum of V terms and a logarithm differ by at most 2 V 2^-24
// relative to the sum, and each of a part's two roundings of lse adds 2^-24 |lse|.
TEST_CASE("slices give what the matrix gives") {
  Draw draw;
  const Cut cut = any_cut();
  const DType dtype = GENERATE(f32, bf16, f64);
  INFO(dtype << ", seed " << draw.seed << ", chunks of " << cut.chunk << ", slices of "
             << cut.rows);
  const Tensor matrix = raw::cast(draw.normal({7, 5}), dtype),
               x = raw::cast(draw.normal({4, 2, 5}), dtype), ids = draw.indices({3, 4}, 7, i32),
               targets = draw.indices({8}, 7, i32);
  CHECK(numbers(finished(SlicedEmbedding(ids), matrix, cut)) == numbers(embedding(matrix, ids)));
  CHECK(numbers(finished(SlicedLinear(x), matrix, cut)) == numbers(linear(x, matrix)));
  const Tensor logits = reshape(linear(x, matrix), {8, 7});
  const double whole = cross_entropy(logits, targets).item(),
               unit = dtype == f64 ? 0x1p-53 : 0x1p-24;
  double top = 0;
  for (const double v : numbers(logits)) top = std::max(top, std::abs(v));
  for (const std::int64_t most : {1, 20, 1000}) {
    const double sliced = finished(SlicedCrossEntropy(x, targets, most), matrix, cut).item();
    CHECK(std::abs(sliced - whole) <= unit * (2 * 7 + 8 * (top + std::log(7.0))));
  }
}

TEST_CASE("an id beyond the matrix gives NaN, slice by slice") {
  Draw draw;
  const Cut cut = any_cut();
  const Tensor matrix = draw.normal({7, 3}), x = draw.normal({5, 3});
  const Tensor ids = Tensor::from(std::vector<std::int64_t>{0, 7, 4, -1, -2}, {5}, draw.device);
  const auto rows = numbers(finished(SlicedEmbedding(ids), matrix, cut));
  for (std::size_t r = 0; r < 5; ++r) CHECK(std::isnan(rows[3 * r]) == (r != 0 && r != 2));
  CHECK(std::isnan(finished(SlicedCrossEntropy(x, ids, 4), matrix, cut).item()));
}

TEST_CASE("slice by slice, too, a target of -100 has neither loss nor gradient") {
  Draw draw;
  const Cut cut = any_cut();
  const std::int64_t most = GENERATE(1, 20, 1000);
  const Tensor matrix = draw.normal({7, 3}), x = draw.normal({4, 3});
  const auto check = [&](const std::vector<std::int64_t>& ids, const TargetCount& count) {
    const Tensor targets = Tensor::from(ids, {4}, draw.device);
    const auto result_of = [&](const auto& loss_of) {
      const Tensor leaf = matrix.detach().require_grad(), input = x.detach().require_grad();
      const Tensor loss = loss_of(input, leaf);
      loss.backward();
      std::vector<double> all = numbers(input.grad());
      for (const double v : numbers(leaf.grad())) all.push_back(v);
      all.push_back(loss.item());
      return all;
    };
    const auto sliced = result_of([&](const Tensor& input, const Tensor& leaf) {
      return finished(SlicedCrossEntropy(input, targets, most, count), leaf, cut);
    });
    const auto whole = result_of([&](const Tensor& input, const Tensor& leaf) {
      return linear_cross_entropy(input, leaf, {}, targets, 4, {.count = count});
    });
    for (std::size_t i = 0; i < whole.size(); ++i) CHECK(std::abs(sliced[i] - whole[i]) < 1e-13);
  };
  check({6, -100, 0, 3}, {});
  check({6, -100, 0, 3}, {Tensor::full({}, 5, f32, draw.device), 2});
  check({-100, -100, -100, -100}, {});
}

TEST_CASE("a loss goes backward twice over its slices where the graph is retained") {
  Draw draw;
  const std::int64_t most = GENERATE(8, 28);  // logits, of 28: made again, and kept
  Tensor matrix = raw::cast(draw.normal({7, 3}), f32).require_grad(),
         x = raw::cast(draw.normal({4, 3}), f32).require_grad();
  const Tensor loss =
      finished(SlicedCrossEntropy(x, draw.indices({4}, 7, i32), most), matrix, {4, 2});
  loss.backward({}, true);
  const auto dx = numbers(x.grad()), dw = numbers(matrix.grad());
  x.zero_grad();
  matrix.zero_grad();
  loss.backward();
  CHECK(numbers(x.grad()) == dx);
  CHECK(numbers(matrix.grad()) == dw);
}

TEST_CASE("operations slice by slice refuse slices that do not fit, and none") {
  using Catch::Contains;
  Draw draw;
  const Tensor ids = draw.indices({4}, 7, i32), x = draw.normal({4, 3});
  const SliceRows first{7, 4, 0, 2}, second{7, 4, 2, 2};  // 4 rows, and 3
  const Tensor four = draw.normal({4, 3}), wide = draw.normal({3, 5}),
               single = raw::cast(draw.normal({3, 3}), f32);
  SlicedEmbedding rows(ids);
  rows.add(four, first);
  CHECK_THROWS_WITH(rows.add(four, second), Contains("[4, 3]; expected [3, C]"));
  CHECK_THROWS_WITH(rows.add(wide, second), Contains("[3, 5]") && Contains("had rows of 3"));
  CHECK_THROWS_WITH(rows.add(single, second), Contains("f32") && Contains("in f64"));
  CHECK_THROWS_WITH(SlicedEmbedding(x), Contains("ids are f64"));
  CHECK_THROWS_WITH(SlicedEmbedding(ids).finish(), Contains("no slice was given"));
  SlicedLinear y(x);
  y.add(four, first);
  CHECK_THROWS_AS(y.add(wide, second), ContractError);
  CHECK_THROWS_AS(y.add(single, second), ContractError);
  SlicedCrossEntropy loss(x, ids, 100);
  CHECK_THROWS_WITH(loss.finish(), Contains("no slice was given"));
  loss.add(four, first);
  CHECK_THROWS_WITH(loss.add(wide, second), Contains("expected [..., C] and [rows, C]"));
  CHECK_THROWS_WITH(loss.add(single, second), Contains("of f32"));
  CHECK_THROWS_AS(SlicedCrossEntropy(x, draw.indices({5}, 7, i32), 100), ContractError);
  CHECK_THROWS_AS(SlicedCrossEntropy(x, ids, 0), ContractError);
}

TEST_CASE(
    "operations slice by slice refuse a slice twice or out of order, and one that is missing") {
  using Catch::Contains;
  Draw draw;
  const Tensor x = draw.normal({4, 3}), ids = draw.indices({4}, 7, i32);
  const Tensor four = draw.normal({4, 3}), three = draw.normal({3, 3});
  const SliceRows first{7, 4, 0, 2}, second{7, 4, 2, 2};
  const auto check = [&](auto make) {
    auto op = make();
    CHECK_THROWS_WITH(op.finish(), Contains("no slice was given"));
    CHECK_THROWS_WITH(op.add(three, second), Contains("expected the slice at 0"));
    CHECK_THROWS_AS(op.add(four, {7, 7, -3, 7}), ContractError);
    op.add(four, first);
    CHECK_THROWS_WITH(op.add(four, first), Contains("expected the slice at 2"));
    CHECK_THROWS_WITH(op.add(draw.normal({1, 3}), {7, 3, 2, 1}),
                      Contains("those before it were of 7 in chunks of 4"));
    CHECK_THROWS_WITH(op.finish(), Contains("the slice at 2 of chunks of 4 is missing"));
    op.add(three, second);
    CHECK(op.finish().defined());
    CHECK_THROWS_WITH(op.finish(), Contains("finish was called before"));
    CHECK_THROWS_WITH(op.add(four, first), Contains("before finish"));
  };
  check([&] { return SlicedEmbedding(ids); });
  check([&] { return SlicedLinear(x); });
  check([&] { return SlicedCrossEntropy(x, ids, 100); });
}

TEST_CASE("a matrix without rows gives no columns, and no loss") {
  Draw draw;
  const Tensor none = draw.normal({0, 3}), x = draw.normal({4, 3});
  SlicedLinear y(x);
  y.add(none, SliceRows::whole(0));
  CHECK(y.finish().shape() == Shape{4, 0});
  SlicedCrossEntropy loss(x, draw.indices({4}, 7, i32), 100);
  CHECK_THROWS_WITH(loss.add(none, SliceRows::whole(0)), Catch::Contains("the mean of nothing"));
}
