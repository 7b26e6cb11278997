// Matrix products of every orientation, stack and layout against the definition.
#include "tests/support/share.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;
using raw::Transpose;

namespace {

// Sums of k products of values of at most kLargest: k + 1 roundings in f32 (f64) of sum|a b|, as
// many in the reference, then one to the dtype of the result.
std::function<double(double)> product_error(DType dtype, std::int64_t k, DType out) {
  const double n = static_cast<double>(k);
  const double inner =
      2 * unit_roundoff(dtype == f64 ? f64 : f32) * (n + 1) * kLargest * kLargest * n;
  return [=](double v) { return 1.01 * unit_roundoff(out) * std::abs(v) + inner; };
}

double product(const Host& a, const Host& b, Shape at, Transpose ta, Transpose tb) {
  const int n = at.ndim();
  const auto element = [](const Host& x, Shape where, std::int64_t r, std::int64_t c, Transpose t) {
    where[where.ndim() - 2] = t == Transpose::yes ? c : r;
    where[where.ndim() - 1] = t == Transpose::yes ? r : c;
    return x.spread(where);
  };
  const std::int64_t k = ta == Transpose::yes ? a.shape[a.shape.ndim() - 2] : a.shape.back();
  double sum = 0;
  for (std::int64_t i = 0; i < k; ++i) {
    // `spread` treats a matrix dimension of size 1 as a broadcast one, which names the same
    // element.
    sum += element(a, at, at[n - 2], i, ta) * element(b, at, i, at[n - 1], tb);
  }
  return sum;
}

Shape product_shape(const Host& a, const Host& b, Transpose ta, Transpose tb) {
  Shape la, lb;
  for (int d = 0; d < a.shape.ndim() - 2; ++d) la.push_back(a.shape[d]);
  for (int d = 0; d < b.shape.ndim() - 2; ++d) lb.push_back(b.shape[d]);
  Shape out = broadcast(la, lb);
  out.push_back(ta == Transpose::yes ? a.shape.back() : a.shape[a.shape.ndim() - 2]);
  out.push_back(tb == Transpose::yes ? b.shape[b.shape.ndim() - 2] : b.shape.back());
  return out;
}

}  // namespace

TEST_CASE("products of matrices and stacks") {
  const Device device = any_device();
  Draw draw;
  GridShare share;
  struct Case {
    Shape a, b;  // before transposition
  };
  for (const Case& c :
       {Case{{3, 4}, {4, 5}}, Case{{1, 1}, {1, 1}}, Case{{1, 4}, {4, 1}}, Case{{5, 1}, {1, 3}},
        Case{{2, 3, 4}, {4, 5}}, Case{{3, 4}, {2, 4, 5}}, Case{{2, 3, 4}, {2, 4, 5}},
        Case{{2, 1, 3, 4}, {3, 4, 5}}, Case{{2, 3, 3, 4}, {1, 3, 4, 5}}, Case{{1, 3, 4}, {6, 4, 5}},
        Case{{0, 4}, {4, 5}}, Case{{3, 0}, {0, 5}}, Case{{2, 3, 0}, {0, 5}},
        Case{{2, 3, 0}, {2, 0, 5}}, Case{{0, 3, 4}, {4, 5}}, Case{{0, 3, 4}, {0, 4, 5}},
        Case{{37, 65}, {65, 33}}})
    for (const DType dtype : {f32, f64, bf16, f16})
      for (const Transpose ta : {Transpose::no, Transpose::yes})
        for (const Transpose tb : {Transpose::no, Transpose::yes})
          for (const bool views : {false, true}) {
            if (!share.takes()) continue;
            // The transposition is asked of the product, or undone by a view of the operand.
            INFO(c.a << (ta == Transpose::yes ? "^T " : " ") << c.b
                     << (tb == Transpose::yes ? "^T " : " ") << dtype << (views ? ", views" : "")
                     << ", seed " << draw.seed);
            const auto stored = [](Shape s, Transpose t) {
              if (t == Transpose::yes) std::swap(s[s.ndim() - 2], s[s.ndim() - 1]);
              return s;
            };
            Pair a = draw(stored(c.a, ta), dtype, device), b = draw(stored(c.b, tb), dtype, device);
            const Host expected =
                Host::build(product_shape(a.host, b.host, ta, tb),
                            [&](const Shape& at) { return product(a.host, b.host, at, ta, tb); });
            if (views && ta == Transpose::yes) a.tensor = raw::transpose(a.tensor, -1, -2);
            if (views && tb == Transpose::yes) b.tensor = raw::transpose(b.tensor, -1, -2);
            check_values(raw::matmul(a.tensor, b.tensor, views ? Transpose::no : ta,
                                     views ? Transpose::no : tb),
                         dtype, expected, product_error(dtype, c.a.back(), dtype));
          }
}

TEST_CASE("products of operands in odd layouts") {
  const Device device = any_device();
  Draw draw;
  const View as[] = {{"sliced columns", {2, 3, 9}, {{Step::slice, {2, 2, 6}}}},
                     {"rows broadcast", {2, 1, 4}, {{Step::expand, {2, 3, 4}}}},
                     {"columns broadcast", {2, 3, 1}, {{Step::expand, {2, 3, 4}}}},
                     {"stack broadcast", {3, 4}, {{Step::expand, {2, 3, 4}}}},
                     {"heads behind rows", {3, 2, 4}, {{Step::permute, {1, 0, 2}}}},
                     {"stack innermost", {3, 4, 2}, {{Step::permute, {2, 0, 1}}}}};
  const View bs[] = {{"plain", {2, 4, 5}, {}},
                     {"one matrix", {4, 5}, {}},
                     {"transposed", {2, 5, 4}, {{Step::permute, {0, 2, 1}}}},
                     {"sliced rows", {2, 7, 5}, {{Step::slice, {1, 1, 5}}}}};
  for (const View& left : as)
    for (const View& right : bs) {
      INFO(left.name << " times " << right.name << ", seed " << draw.seed);
      const Pair a = draw(left, f32, device), b = draw(right, f32, device);
      check_values(raw::matmul(a.tensor, b.tensor), f32,
                   Host::build({2, 3, 5},
                               [&](const Shape& at) {
                                 return product(a.host, b.host, at, Transpose::no, Transpose::no);
                               }),
                   product_error(f32, 4, f32));
    }
}

TEST_CASE("a stack whose dimensions do not merge") {
  const Device device = any_device();
  Draw draw;
  INFO("seed " << draw.seed);
  const Pair a = draw({"", {3, 2, 2, 4}, {{Step::permute, {1, 0, 2, 3}}}}, f64, device),
             b = draw({"", {2, 5, 4, 3}, {{Step::slice, {1, 1, 4}}}}, f64, device);
  check_values(raw::matmul(a.tensor, b.tensor), f64,
               Host::build({2, 3, 2, 3},
                           [&](const Shape& at) {
                             return product(a.host, b.host, at, Transpose::no, Transpose::no);
                           }),
               product_error(f64, 4, f64));
}

TEST_CASE("matmul_into scales, adds, writes a wider dtype and takes a bias") {
  const Device device = any_device();
  Draw draw;
  for (const auto& [dtype, out_dtype] :
       {std::pair{f32, f32}, {f64, f64}, {bf16, f32}, {f16, f32}, {bf16, bf16}})
    for (const double beta : {0.0, 1.0, 0.5}) {
      INFO(dtype << " into " << out_dtype << ", beta " << beta << ", seed " << draw.seed);
      const Pair a = draw({6, 3}, dtype, device), b = draw({6, 5}, dtype, device),
                 bias = draw({"", {5, 2}, {{Step::slice, {1, 1, 2}}}}, dtype, device);
      const Pair before = draw({3, 9}, out_dtype, device);
      // Columns 2 to 6 of a wider array; with beta 0 what is there is never read.
      const Tensor out = raw::slice(before.tensor, 1, 2, 7);
      if (beta == 0) raw::fill(out, NAN);
      raw::matmul_into(out, a.tensor, b.tensor, Transpose::yes, Transpose::no, 2, beta,
                       raw::reshape(bias.tensor, {5}));
      Host expected = before.host;
      for (std::int64_t r = 0; r < 3; ++r)
        for (std::int64_t c = 0; c < 5; ++c)
          expected.values[static_cast<std::size_t>(r * 9 + 2 + c)] =
              2 * product(a.host, b.host, {r, c}, Transpose::yes, Transpose::no) +
              (beta == 0 ? 0 : beta * before.host.at({r, 2 + c})) +
              bias.host.values[static_cast<std::size_t>(c)];
      // Six products twice, what was there and the bias weigh no more than 13 products.
      check_values(before.tensor, out_dtype, expected, product_error(dtype, 13, out_dtype));
    }
}

TEST_CASE("matmul_into adds to another tensor than it writes") {
  const Device device = any_device();
  Draw draw;
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const bool by_columns : {false, true}) {
      INFO(dtype << (by_columns ? ", by columns" : "") << ", seed " << draw.seed);
      const Pair a = draw({3, 6}, dtype, device), b = draw({6, 5}, dtype, device),
                 added = draw({3, 5}, dtype, device);
      Tensor out = Tensor::empty({3, 5}, dtype, device), first = added.tensor;
      if (by_columns) {
        out = raw::transpose(Tensor::empty({5, 3}, dtype, device), 0, 1);
        first = raw::transpose(raw::contiguous(raw::transpose(first, 0, 1)), 0, 1);
      }
      raw::matmul_into(out, a.tensor, b.tensor, Transpose::no, Transpose::no, 1, 0.5, {}, first);
      Host expected = added.host;
      for (std::int64_t r = 0; r < 3; ++r)
        for (std::int64_t c = 0; c < 5; ++c)
          expected.values[static_cast<std::size_t>(r * 5 + c)] =
              product(a.host, b.host, {r, c}, Transpose::no, Transpose::no) +
              0.5 * added.host.at({r, c});
      check_values(out, dtype, expected, product_error(dtype, 7, dtype));
      CHECK_THROWS_WITH(
          raw::matmul_into(out, a.tensor, b.tensor, Transpose::no, Transpose::no, 1, 1, {},
                           raw::reshape(first, {5, 3})),
          Catch::Contains("what is added is [5, 3]") && Catch::Contains("expected the same"));
    }
}

TEST_CASE("a stack without elements, however it lies, gives zeros") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto zeros = [&](const Shape& s) { return Tensor::zeros(s, f32, device); };
  const Tensor sliced = raw::slice(zeros({1, 5, 0, 2}), 1, 0, 5, 2);  // [1, 3, 0, 2]
  const Tensor crossed = raw::transpose(zeros({3, 4, 4, 0}), 0, 1);   // [4, 3, 4, 0]
  const Tensor y = raw::matmul(crossed, raw::expand(sliced, {4, 3, 0, 2}));
  CHECK(y.shape() == Shape{4, 3, 4, 2});
  CHECK(y.to_vector<float>() == std::vector<float>(96, 0.f));
  CHECK_THROWS_AS(raw::matmul(zeros({2, 4, 0}), zeros({3, 0, 2})), ContractError);
}

TEST_CASE("products that do not fit are refused with both shapes") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto zeros = [&](const Shape& s, DType d = f32) { return Tensor::zeros(s, d, device); };
  using Catch::Contains;
  CHECK_THROWS_WITH(raw::matmul(zeros({2, 3}), zeros({4, 5})),
                    Contains("[2, 3]") && Contains("[4, 5]") && Contains("3 and 4"));
  CHECK_THROWS_WITH(raw::matmul(zeros({3}), zeros({3, 2})), Contains("[3]"));
  CHECK_THROWS_WITH(raw::matmul(zeros({2, 3}), zeros({3, 2}, f64)), Contains("f64"));
  CHECK_THROWS_AS(raw::matmul(zeros({2, 3}, i64), zeros({3, 2}, i64)), ContractError);
  CHECK_THROWS_AS(raw::matmul(zeros({2, 2, 3}), zeros({3, 3, 2})), ContractError);
  CHECK_THROWS_WITH(raw::matmul_into(zeros({2, 3}), zeros({2, 4}), zeros({4, 2}), Transpose::no,
                                     Transpose::no, 1, 0),
                    Contains("[2, 3]"));
  for (const Tensor& bias : {zeros({2}, bf16), zeros({3}), zeros({1, 2})}) {
    CHECK_THROWS_WITH(raw::matmul_into(zeros({2, 2}), zeros({2, 4}), zeros({4, 2}), Transpose::no,
                                       Transpose::no, 1, 0, bias),
                      Contains("bias is ") && Contains("expected [2] of f32"));
    CHECK_THROWS_WITH(raw::matmul_gelu_into(zeros({2, 2}), zeros({2, 2}), zeros({2, 4}),
                                            zeros({4, 2}), Transpose::no, Transpose::no, bias),
                      Contains("bias is ") && Contains("expected [2] of f32"));
  }
}
