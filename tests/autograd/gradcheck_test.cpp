// The checker itself: what is right passes, what is wrong is named.
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using tessera::testing::Draw;

namespace {

// x^2 with a backward that multiplies by `factor` x, and adds `offset` to the element `at`.
Tensor square(const Tensor& x, double factor, double offset = 0, std::int64_t at = 0) {
  return record("square", {x}, raw::mul(x, x),
                [x = Saved(x), factor, offset, at](const Tensor& g, Gradients& out) {
                  Tensor dx = raw::mul(raw::mul(g, x.get()), factor);
                  if (offset != 0) {
                    const Tensor one = dx.view({1}, {1}, at);
                    raw::copy_into(one, raw::binary(raw::Binary::add, one, offset));
                  }
                  out.set(0, dx);
                });
}

}  // namespace

TEST_CASE("a right derivative passes without a word") {
  Draw draw;
  INFO("seed " << draw.seed);
  const GradcheckReport report =
      gradcheck([](const auto& x) { return square(x[0], 2); }, {draw.normal({3, 4})});
  CHECK(report.passed);
  CHECK(report.message.empty());
}

TEST_CASE("a wrong derivative is caught and named with operation, input, element and both values") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor a = draw.away_from_zero({3, 4}), b = draw.normal({3, 4});
  SECTION("by a factor") {
    CHECK_FALSE(gradcheck([](const auto& x) { return square(x[0], 2.001); }, {a}).passed);
  }
  SECTION("in one element by a millionth") {
    const GradcheckReport report = gradcheck(
        [](const auto& x) {
          return raw::mul(x[0], x[0]).defined() ? square(x[1], 2, 1e-6, 7) : x[0];
        },
        {b, a});
    CHECK_FALSE(report.passed);
    CHECK_THAT(report.message,
               Catch::Contains("'square', input 1, element [1, 3]: backward gives") &&
                   Catch::Contains("expected"));
  }
  SECTION("by being absent") {
    const auto forgets = [](const std::vector<Tensor>& x) {
      return record(
          "forgets", {x[0], x[1]}, raw::mul(x[0], x[1]),
          [b = Saved(x[1])](const Tensor& g, Gradients& out) { out.set(0, raw::mul(g, b.get())); });
    };
    const GradcheckReport report = gradcheck(forgets, {b, a});
    CHECK_FALSE(report.passed);
    CHECK_THAT(report.message, Catch::Contains("'forgets', input 1"));
  }
  SECTION("by having no history at all") {
    const GradcheckReport report =
        gradcheck([](const auto& x) { return raw::mul(x[0], x[0]); }, {a});
    CHECK_FALSE(report.passed);
    CHECK_THAT(report.message, Catch::Contains("without history"));
  }
  SECTION("by being NaN") {
    const auto nan = [](const std::vector<Tensor>& x) {
      return record("nan", {x[0]}, raw::mul(x[0], 2), [](const Tensor& g, Gradients& out) {
        out.set(0, raw::mul(g, std::numeric_limits<double>::quiet_NaN()));
      });
    };
    CHECK_FALSE(gradcheck(nan, {a}).passed);
  }
}

TEST_CASE("a backward that forgets to accumulate is caught by the second pass") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto overwrites = [](const std::vector<Tensor>& x) {
    return record("overwrites", {x[0]}, raw::mul(x[0], 3), [](const Tensor& g, Gradients& out) {
      const auto sink = out.sink(0);
      raw::axpby(sink->tensor, g, 3 * sink->scale, 0);
    });
  };
  const GradcheckReport report = gradcheck(overwrites, {draw.normal({2})});
  CHECK_FALSE(report.passed);
  CHECK_THAT(report.message, Catch::Contains("a second backward adds"));
}

TEST_CASE("functions that cannot be checked are refused") {
  Draw draw;
  const Tensor x = draw.normal({2});
  CHECK_THROWS_WITH(gradcheck([](const auto& v) { return cast(v[0], f32); }, {x}),
                    Catch::Contains("expected f64"));
  int calls = 0;
  CHECK_THROWS_WITH(gradcheck([&](const auto& v) { return mul(v[0], ++calls); }, {x}),
                    Catch::Contains("other values when it is called again"));
}
