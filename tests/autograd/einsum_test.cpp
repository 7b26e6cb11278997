// Einstein sums against nested loops over all letters.
#include <map>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

// The sum over every value of every letter; "ij,jk->ik" without dots.
std::vector<double> by_loops(const std::string& left, const std::string& right,
                             const std::string& result, const Tensor& a, const Tensor& b) {
  std::map<char, std::int64_t> sizes;
  for (std::size_t d = 0; d < left.size(); ++d) sizes[left[d]] = a.size(static_cast<int>(d));
  for (std::size_t d = 0; d < right.size(); ++d) sizes[right[d]] = b.size(static_cast<int>(d));
  std::int64_t all = 1, size = 1;
  for (const auto& [c, n] : sizes) all *= n;
  for (const char c : result) size *= sizes[c];
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  std::vector<double> out(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < all; ++i) {
    std::map<char, std::int64_t> at;
    std::int64_t rest = i;
    for (const auto& [c, n] : sizes) at[c] = rest % n, rest /= n;
    const auto place = [&](const std::string& letters) {
      std::int64_t p = 0;
      for (const char c : letters) p = p * sizes[c] + at[c];
      return static_cast<std::size_t>(p);
    };
    out[place(result)] += x[place(left)] * y[place(right)];
  }
  return out;
}

}  // namespace

TEST_CASE("einsum is the sum over all letters") {
  Draw draw;
  struct Formula {
    std::string left, right, result;
    Shape a, b;
  };
  for (const auto& [left, right, result, a, b] :
       {Formula{"ij", "jk", "ik", {2, 3}, {3, 4}},
        {"bqd", "bkd", "bqk", {2, 3, 2}, {2, 4, 2}},
        {"ij", "ij", "", {2, 3}, {2, 3}},
        {"i", "j", "ji", {2}, {3}},
        {"ij", "k", "kj", {2, 3}, {2}},
        {"ii", "ij", "j", {3, 3}, {3, 2}},
        {"iij", "jj", "ij", {2, 2, 3}, {3, 3}},
        {"bhqd", "bkhd", "bhqk", {2, 2, 3, 2}, {2, 3, 2, 2}},
        {"ij", "jk", "ik", {2, 0}, {0, 4}}}) {
    const std::string formula = left + ", " + right + " -> " + result;
    INFO(formula << ", seed " << draw.seed);
    const Tensor x = draw.normal(a), y = draw.normal(b), z = einsum(formula, x, y);
    const std::vector<double> expected = by_loops(left, right, result, x, y);
    const std::vector<double> got = raw::contiguous(z).to_vector<double>();
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      CHECK(std::abs(got[i] - expected[i]) <= 0x1p-46);  // twelve terms of size 16, twice
    check_gradients([&](const auto& v) { return einsum(formula, v[0], v[1]); }, {x, y});
  }
}

TEST_CASE("einsum: dots, results left out, sizes of 1 and what it refuses") {
  Draw draw;
  const Tensor a = draw.normal({2, 1, 3, 4}), b = draw.normal({5, 4, 2}), m = draw.normal({3, 4});
  CHECK(einsum("...ij,...jk->...ik", a, b).shape() == Shape{2, 5, 3, 2});
  CHECK(einsum("...ij,jk->i...k", a, draw.normal({4, 7})).shape() == Shape{3, 2, 1, 7});
  CHECK(einsum("ba,bc", m, draw.normal({3, 2})).shape() == Shape{4, 2});
  CHECK(einsum("ij,ij->ij", m, draw.normal({3, 1})).shape() == Shape{3, 4});
  check_gradients([](const auto& v) { return einsum("...j,jk", v[0], v[1]); },
                  {draw.normal({2, 3}), draw.normal({3, 2})});
  CHECK_THROWS_WITH(einsum("ij->ji", m, m), Catch::Contains("two operands"));
  CHECK_THROWS_WITH(einsum("ijk,jk->i", m, m), Catch::Contains("'ijk'"));
  CHECK_THROWS_WITH(einsum("ij,jk->ik", m, m), Catch::Contains("'j'"));
  CHECK_THROWS_WITH(einsum("ij,ij->k", m, m), Catch::Contains("no operand"));
  CHECK_THROWS_WITH(einsum("ij,ij->ii", m, m), Catch::Contains("twice"));
  CHECK_THROWS_WITH(einsum("i1,ij->i", m, m),
                    Catch::Contains("has the sign '1'; expected letters"));
}
