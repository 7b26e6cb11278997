// Reductions, softmax and indexing against their definitions.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/share.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;
using raw::KeepDim;
using raw::Reduction;

namespace {

double combine(Reduction op, const std::vector<double>& v) {
  const auto n = static_cast<long double>(v.size());
  long double sum = 0, squares = 0;
  for (const long double x : v) {
    sum += x;
    squares += x * x;
  }
  switch (op) {
    case Reduction::sum:
      return static_cast<double>(sum);
    case Reduction::mean:
      return static_cast<double>(sum / n);
    case Reduction::max:
      return *std::max_element(v.begin(), v.end());
    case Reduction::min:
      return *std::min_element(v.begin(), v.end());
    case Reduction::argmax:
      return static_cast<double>(std::max_element(v.begin(), v.end()) - v.begin());
    case Reduction::argmin:
      return static_cast<double>(std::min_element(v.begin(), v.end()) - v.begin());
    case Reduction::sumsq:
      return static_cast<double>(squares);
  }
  return 0;
}

Host reduced(Reduction op, const Host& x, int d, KeepDim keep) {
  const Shape kept = x.shape.with(d, 1);
  Host out = Host::build(kept, [&](Shape at) {
    std::vector<double> line;
    for (at[d] = 0; at[d] < x.shape[d]; ++at[d]) line.push_back(x.at(at));
    return combine(op, line);
  });
  if (keep == KeepDim::no) out.shape = x.shape.without(d);
  return out;
}

// Sums of n terms, blocked as kernels/reduce.hpp says, are off by log2(n) + 40 roundings in f32
// (f64) of the sum of their sizes; the reference by n roundings in long double (f64 on some
// processors). A term is at most kLargest, or its square. Then one rounding to the dtype. All else
// is exact.
std::function<double(double)> summed(Reduction op, DType dtype, std::int64_t n) {
  if (!is_floating(dtype) ||
      (op != Reduction::sum && op != Reduction::mean && op != Reduction::sumsq))
    return {};
  const auto terms = static_cast<double>(n);
  const double ours = unit_roundoff(dtype == f64 ? f64 : f32) * (std::log2(terms + 1) + 40),
               reference = std::numeric_limits<long double>::epsilon() / 2 * terms,
               term = op == Reduction::sumsq ? kLargest * kLargest : kLargest,
               inner = (ours + reference) * term * (op == Reduction::mean ? 1 : terms);
  return [=](double v) { return 1.01 * unit_roundoff(dtype) * std::abs(v) + inner; };
}

constexpr Reduction kOfFloating[] = {Reduction::sum,  Reduction::mean,   Reduction::max,
                                     Reduction::min,  Reduction::argmax, Reduction::argmin,
                                     Reduction::sumsq};
constexpr Reduction kOfInteger[] = {Reduction::sum, Reduction::max, Reduction::min,
                                    Reduction::argmax, Reduction::argmin};

DType result(Reduction op, DType dtype) {
  return op == Reduction::argmax || op == Reduction::argmin ||
                 (op == Reduction::sum && !is_floating(dtype))
             ? i64
             : dtype;
}

}  // namespace

TEST_CASE("reductions over each dimension of any layout") {
  const Device device = any_device();
  Draw draw;
  GridShare share;
  std::vector<View> views = same_shape_views();
  views.push_back(odd_views()[4]);
  views.push_back({"wide", {3, 3000}, {}});
  for (const View& view : views)
    for (const DType dtype : {f32, f64, bf16, f16, i32, i64}) {
      if (!share.takes()) continue;
      const Pair x = draw(view, dtype, device);
      for (int dim = -x.host.shape.ndim(); dim < x.host.shape.ndim(); ++dim)
        for (const KeepDim keep : {KeepDim::no, KeepDim::yes}) {
          INFO(view.name << ", " << dtype << ", dimension " << dim << ", seed " << draw.seed);
          const int d = normalize_dim(dim, x.host.shape.ndim());
          const auto check = [&](Reduction op) {
            check_values(raw::reduce(op, x.tensor, dim, keep), result(op, dtype),
                         reduced(op, x.host, d, keep), summed(op, dtype, x.host.shape[d]));
          };
          if (is_floating(dtype))
            for (const Reduction op : kOfFloating) check(op);
          else
            for (const Reduction op : kOfInteger) check(op);
        }
    }
}

TEST_CASE("reductions to one value") {
  const Device device = any_device();
  Draw draw;
  std::vector<View> views = same_shape_views();
  views.push_back(odd_views()[0]);
  views.push_back(odd_views()[6]);
  for (const View& view : views)
    for (const DType dtype : {f32, f64, i32}) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device);
      for (const Reduction op : kOfInteger)
        check_values(raw::reduce_all(op, x.tensor), result(op, dtype),
                     {{}, {combine(op, x.host.values)}}, summed(op, dtype, x.host.shape.numel()));
    }
}

TEST_CASE("reductions over several dimensions of any layout") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views())
    for (const DType dtype : {f32, i64}) {
      const Pair x = draw(view, dtype, device);  // [2, 3, 4]
      const std::pair<Dims, std::vector<int>> lists[] = {
          {{0, 1}, {0, 1}}, {{-1, 1}, {1, 2}}, {{2, 0}, {0, 2}}, {{1}, {1}}, {{}, {0, 1, 2}}};
      for (const auto& [dims, numbers] : lists)
        for (const KeepDim keep : {KeepDim::no, KeepDim::yes})
          for (const Reduction op : {Reduction::sum, Reduction::max}) {
            INFO(view.name << ", " << dtype << ", dimension " << numbers[0] << " and "
                           << numbers.size() - 1 << " more, seed " << draw.seed);
            Host expected = x.host;
            for (std::size_t i = numbers.size(); i-- > 0;)
              expected = reduced(op, expected, numbers[i], keep);
            check_values(raw::reduce(op, x.tensor, dims, keep), result(op, dtype), expected,
                         summed(op, dtype, 24));
          }
    }
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  CHECK_THROWS_WITH(raw::reduce(Reduction::sum, x, {0, -2}), Catch::Contains("named twice"));
  CHECK_THROWS_AS(raw::reduce(Reduction::sum, x, {0, 2}), ContractError);
}

TEST_CASE("reductions of nothing") {
  const Device device = any_device();
  const Tensor x = Tensor::zeros({2, 0}, f32, device);
  check_values(raw::reduce(Reduction::sum, x, 1), f32, {{2}, {0, 0}});
  check_values(raw::reduce(Reduction::sumsq, x, 1), f32, {{2}, {0, 0}});
  check_values(raw::reduce(Reduction::mean, x, 1), f32, {{2}, {NAN, NAN}});
  check_values(raw::reduce(Reduction::argmax, x, 1), i64, {{2}, {0, 0}});
  check_values(raw::reduce(Reduction::sum, x, 0), f32, {{0}, {}});
  check_values(raw::reduce_all(Reduction::sum, x), f32, {{}, {0}});
  CHECK_THROWS_WITH(raw::reduce(Reduction::mean, Tensor::zeros({2}, i32, device), 0),
                    Catch::Contains("mean") && Catch::Contains("i32"));
  const Tensor one = Tensor::full({}, 7, f32, device);
  CHECK(raw::reduce(Reduction::sum, one, 0).item() == 7);
  CHECK_THROWS_AS(raw::reduce(Reduction::sum, one, 1), ContractError);
}

TEST_CASE("sum_to undoes broadcasting") {
  const Device device = any_device();
  Draw draw;
  for (const auto& [small, big] : {std::pair<Shape, Shape>{{3}, {2, 3}},
                                   {{}, {2, 3}},
                                   {{2, 1}, {2, 3}},
                                   {{1, 1}, {2, 3}},
                                   {{3, 1, 2}, {4, 3, 5, 2}},
                                   {{2, 3}, {2, 3}},
                                   {{3}, {0, 3}},
                                   {{1}, {0}}}) {
    INFO(small << " from " << big << ", seed " << draw.seed);
    const Pair x = draw(big, f64, device);
    Host expected = Host::make(small);
    Host::build(big, [&](const Shape& at) {
      Shape own = expected.shape;
      std::int64_t i = 0;
      for (int d = 0; d < own.ndim(); ++d)
        i = i * own[d] + (own[d] == 1 ? 0 : at[at.ndim() - own.ndim() + d]);
      expected.values[static_cast<std::size_t>(i)] += x.host.at(at);
      return 0.;
    });
    check_values(raw::sum_to(x.tensor, small), f64, expected,
                 summed(Reduction::sum, f64, big.numel()));
  }
  CHECK_THROWS_WITH(raw::sum_to(Tensor::zeros({2, 3}, f32, device), {4}),
                    Catch::Contains("[2, 3]"));
}

TEST_CASE("softmax and its derivative over the last dimension of any layout") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views())
    for (const DType dtype : {f32, f64, bf16, f16}) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device), g = draw(view, dtype, device);
      const auto y = [&](const Shape& at) {
        double sum = 0;
        Shape other = at;
        for (other[2] = 0; other[2] < 4; ++other[2]) sum += std::exp(x.host.at(other));
        return std::exp(x.host.at(at)) / sum;
      };
      const Host expected = Host::build({2, 3, 4}, y);
      // In roundings in f32 (f64): y, at most 1, has 6 from x - max, 3 from its exponential, as
      // many from the sum's terms, 4 from summing and dividing. y (g - dot) has 4 of |dot|, one of
      // |g - dot| and one of the product: 4 * 3 + 6 + 6 with |g| up to kLargest. As many again for
      // the reference; then one rounding to the dtype.
      const auto tolerance = [&](double v) {
        return 1.01 * unit_roundoff(dtype) * std::abs(v) +
               64 * unit_roundoff(dtype == f64 ? f64 : f32) + (dtype == f16 ? 0x1p-25 : 0);
      };
      const Tensor got = raw::softmax(x.tensor);
      check_values(got, dtype, expected, tolerance);
      const Host read = to_host(got);  // the derivative is a formula in y as it was rounded
      check_values(raw::softmax_backward(got, g.tensor), dtype,
                   Host::build({2, 3, 4},
                               [&](const Shape& at) {
                                 double dot = 0;
                                 Shape other = at;
                                 for (other[2] = 0; other[2] < 4; ++other[2])
                                   dot += read.at(other) * g.host.at(other);
                                 return read.at(at) * (g.host.at(at) - dot);
                               }),
                   tolerance);
    }
  CHECK(raw::softmax(Tensor::zeros({0, 3}, f32, device)).shape() == Shape{0, 3});
  CHECK_THROWS_WITH(raw::softmax(Tensor::zeros({2}, i64, device)), Catch::Contains("i64"));
  CHECK_THROWS_AS(raw::softmax(Tensor::zeros({}, f32, device)), ContractError);
}

TEST_CASE("index_select, gather and their additions, repeats among the indices") {
  const Device device = any_device();
  Draw draw;
  const DType index_dtype = GENERATE(i32, i64);
  for (const View& view : same_shape_views())
    for (const DType dtype : {f64, f32, i64})
      for (int dim = -3; dim < 3; ++dim) {
        INFO(view.name << ", " << dtype << ", index " << index_dtype << ", dimension " << dim
                       << ", seed " << draw.seed);
        const int d = normalize_dim(dim, 3);
        const Pair x = draw(view, dtype, device);
        const auto random_index = [&](const Shape& shape) {
          Host at = Host::make(shape);
          for (double& v : at.values)
            v = static_cast<double>(draw.rng() % static_cast<std::uint64_t>(x.host.shape[d]));
          return at;
        };
        const Host rows = random_index({5}), all = random_index(x.host.shape.with(d, 5));
        const Tensor row_index = to_device(rows, index_dtype, device),
                     all_index = to_device(all, index_dtype, device);
        const auto moved = [&](Shape at, double to) {
          at[d] = static_cast<std::int64_t>(to);
          return at;
        };
        check_values(raw::index_select(x.tensor, dim, row_index), dtype,
                     Host::build(all.shape, [&](const Shape& at) {
                       return x.host.at(moved(at, rows.at({at[d]})));
                     }));
        check_values(raw::gather(x.tensor, dim, all_index), dtype,
                     Host::build(all.shape, [&](const Shape& at) {
                       return x.host.at(moved(at, all.at(at)));
                     }));
        const Pair source = draw(all.shape, dtype, device);
        for (const bool by_row : {true, false}) {
          Host expected = x.host;
          Host::build(all.shape, [&](const Shape& at) {
            const Shape to = moved(at, by_row ? rows.at({at[d]}) : all.at(at));
            std::int64_t i = 0;
            for (int k = 0; k < 3; ++k) i = i * expected.shape[k] + to[k];
            auto& v = expected.values[static_cast<std::size_t>(i)];
            v = rounded(v + source.host.at(at), dtype);  // in the order of the source
            return 0.;
          });
          const Tensor out = to_device(x.host, dtype, device);
          if (by_row)
            raw::index_add_into(out, dim, row_index, source.tensor);
          else
            raw::scatter_add_into(out, dim, all_index, source.tensor);
          check_values(out, dtype, expected);
        }
      }
}

TEST_CASE("indices that do not fit are refused, and out of range reads as NaN") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::ones({2, 3}, f32, device);
  const Tensor outside = to_device({{2}, {-1, 2}}, i64, device);
  check_values(raw::index_select(x, 0, outside), f32, {{2, 3}, {NAN, NAN, NAN, NAN, NAN, NAN}});
  CHECK_THROWS_WITH(raw::index_select(x, 0, Tensor::zeros({2}, f32, device)),
                    Catch::Contains("f32") && Catch::Contains("i32 or i64"));
  CHECK_THROWS_WITH(raw::index_select(x, 0, Tensor::zeros({2, 2}, i64, device)),
                    Catch::Contains("[2, 2]"));
  CHECK_THROWS_WITH(raw::gather(x, 0, Tensor::zeros({2, 2}, i64, device)),
                    Catch::Contains("[2, 2]") && Catch::Contains("[2, 3]"));
  CHECK_THROWS_AS(raw::scatter_add_into(x, 0, Tensor::zeros({2, 3}, i64, device),
                                        Tensor::zeros({1, 3}, f32, device)),
                  ContractError);
  CHECK(raw::index_select(x, 0, Tensor::zeros({0}, i64, device)).shape() == Shape{0, 3});
}

TEST_CASE("sumsq_into sums squares into a scalar, also on top of what is there") {
  const Device device = any_device();
  Draw draw;
  INFO("seed " << draw.seed);
  const Pair x = draw({1000}, f32, device);
  const double expected = combine(Reduction::sumsq, x.host.values);
  for (const DType dtype : {f32, f64}) {
    const Tensor out = Tensor::full({}, 5, dtype, device);
    raw::sumsq_into(out, x.tensor, raw::Accumulate::yes);
    // Accumulated in f64: at most a thousand of its roundings, fewer in the reference, and one to
    // the output's dtype.
    const auto tolerance = [&](double v) { return (unit_roundoff(dtype) + 0x1p-43) * std::abs(v); };
    check_values(out, dtype, {{}, {expected + 5}}, tolerance);
    raw::sumsq_into(out, x.tensor, raw::Accumulate::no);
    check_values(out, dtype, {{}, {expected}}, tolerance);
  }
  CHECK_THROWS_AS(raw::sumsq_into(Tensor::zeros({2}, f32, device), x.tensor, raw::Accumulate::no),
                  ContractError);
}
