// Initial values: their distribution, their fans, and that any rank can make any part of them.
#include "tessera/tensor/initializer.hpp"

#include <algorithm>
#include <cmath>

#include "tessera/base/philox.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

constexpr std::int64_t kDrawn = 1 << 16;

std::vector<float> filled(const Initializer& how, const Shape& whole, std::uint64_t key,
                          std::int64_t first, std::int64_t count) {
  const Tensor out = Tensor::empty({count}, f32, Device::cpu());
  how.fill(out, whole, key, first);
  return out.to_vector<float>();
}

struct Moments {
  double mean = 0, deviation = 0, least = INFINITY, most = -INFINITY;
};
Moments moments(const Initializer& how, const Shape& whole, std::uint64_t key) {
  Moments m;
  const auto values = filled(how, whole, key, 0, whole.numel());
  for (const double v : values) m.mean += v / static_cast<double>(values.size());
  for (const double v : values) {
    m.deviation += (v - m.mean) * (v - m.mean) / static_cast<double>(values.size());
    m.least = std::min(m.least, v);
    m.most = std::max(m.most, v);
  }
  m.deviation = std::sqrt(m.deviation);
  return m;
}

// The key is fixed and so are the values: a limit that holds holds always. It is 6 deviations of
// the estimates of n values, s / sqrt(n) of a mean and at most s / sqrt(2 n) of a deviation s.
constexpr double kMeanLimit = 6 / 256.;       // deviations; n = 65,536
constexpr double kDeviationLimit = 6 / 362.;  // relative

std::vector<std::pair<const char*, Initializer>> all() {
  return {{"constant", Initializer::constant(0.5)},
          {"normal", Initializer::normal(1, 2)},
          {"uniform", Initializer::uniform(-1, 3)},
          {"truncated_normal", Initializer::truncated_normal(0, 0.5, -0.25, 1)},
          {"kaiming_normal", Initializer::kaiming_normal()},
          {"kaiming_uniform", Initializer::kaiming_uniform(1, Fan::out)},
          {"xavier_normal", Initializer::xavier_normal()},
          {"xavier_uniform", Initializer::xavier_uniform(2)},
          {"by_index", Initializer::by_index([](std::int64_t i) { return 0.25 * double(i); })},
          {"by_index with a key", Initializer::by_index([](std::int64_t i, std::uint64_t key) {
             return static_cast<double>(unit_float(philox(key, std::uint64_t(i))[0]));
           })}};
}

}  // namespace

TEST_CASE("any part of the initial values is the part of the whole", "[tensor]") {
  const Shape whole{13, 7};
  for (const auto& [name, how] : all()) {
    INFO(name);
    const auto all_of_them = filled(how, whole, 5, 0, whole.numel());
    for (const std::int64_t first : {0, 1, 6, 29, 90}) {
      const std::int64_t count = std::min<std::int64_t>(whole.numel() - first, 17);
      const auto part = filled(how, whole, 5, first, count);
      CHECK(std::equal(part.begin(), part.end(), all_of_them.begin() + first));
    }
    CHECK(filled(how, whole, 5, 91, 0).empty());
  }
}

TEST_CASE("another key gives other values, where values are drawn", "[tensor]") {
  for (const auto& [name, how] : all()) {
    INFO(name);
    const bool is_fixed = std::string(name) == "constant" || std::string(name) == "by_index";
    CHECK((filled(how, {4, 4}, 1, 0, 16) == filled(how, {4, 4}, 2, 0, 16)) == is_fixed);
  }
}

TEST_CASE("fans give the deviation of He and of Glorot", "[tensor]") {
  const Shape whole{128, 64, 8};  // fans of 64 x 8 and 128 x 8
  struct Expected {
    const char* name;
    Initializer how;
    double deviation;
    bool is_uniform;
  };
  const std::vector<Expected> expected = {
      {"kaiming normal", Initializer::kaiming_normal(), std::sqrt(2. / 512), false},
      {"kaiming out", Initializer::kaiming_normal(1, Fan::out), std::sqrt(1. / 1024), false},
      {"kaiming uniform", Initializer::kaiming_uniform(3), 3 / std::sqrt(512.), true},
      {"xavier normal", Initializer::xavier_normal(), std::sqrt(2. / 1536), false},
      {"xavier uniform", Initializer::xavier_uniform(5. / 3), 5. / 3 * std::sqrt(2. / 1536), true}};
  for (const Expected& e : expected) {
    INFO(e.name);
    const Moments m = moments(e.how, whole, 11);
    CHECK(std::abs(m.mean) < kMeanLimit * e.deviation);
    CHECK(std::abs(m.deviation / e.deviation - 1) < kDeviationLimit);
    const double bound = std::sqrt(3.) * e.deviation * (1 + 1e-6);  // as rounded to f32
    CHECK((m.most <= bound && -m.least <= bound) == e.is_uniform);
  }
}

TEST_CASE("uniform and normal values have their bounds and moments", "[tensor]") {
  const Moments u = moments(Initializer::uniform(-1, 3), {kDrawn}, 3);
  CHECK((u.least >= -1 && u.most < 3));
  CHECK(std::abs(u.mean - 1) < kMeanLimit * 4 / std::sqrt(12.));
  const Moments n = moments(Initializer::normal(1, 2), {kDrawn}, 3);
  CHECK(std::abs(n.mean - 1) < kMeanLimit * 2);
  CHECK(std::abs(n.deviation / 2 - 1) < kDeviationLimit);
}

// Of a normal distribution cut at a and b, in deviations: mean (p(a) - p(b)) / Z, variance
// 1 + (a p(a) - b p(b)) / Z - mean^2, with the density p and the share Z within.
TEST_CASE("truncated normal values lie within their bounds, with the moments of the cut",
          "[tensor]") {
  struct Cut {
    double mean, deviation, low, high;
  };
  for (const Cut& cut : {Cut{0, 1, -2, 2}, Cut{0.5, 0.1, 0.45, 10}, Cut{-1, 2, 1, 2}}) {
    INFO(cut.mean << " +- " << cut.deviation << " within " << cut.low << " and " << cut.high);
    const double a = (cut.low - cut.mean) / cut.deviation,
                 b = (cut.high - cut.mean) / cut.deviation;
    const auto density = [](double z) { return std::exp(-z * z / 2) / std::sqrt(2 * M_PI); };
    const double share = (std::erf(b / std::sqrt(2.)) - std::erf(a / std::sqrt(2.))) / 2;
    const double mean = (density(a) - density(b)) / share;
    const double tails = b > 50 ? a * density(a) : a * density(a) - b * density(b);
    const double deviation = cut.deviation * std::sqrt(1 + tails / share - mean * mean);
    const Moments m = moments(
        Initializer::truncated_normal(cut.mean, cut.deviation, cut.low, cut.high), {kDrawn}, 7);
    CHECK(m.least >= cut.low - 1e-6);
    CHECK(m.most <= cut.high + 1e-6);
    CHECK(std::abs(m.mean - (cut.mean + cut.deviation * mean)) < kMeanLimit * deviation);
    CHECK(std::abs(m.deviation / deviation - 1) < kDeviationLimit);
  }
}

TEST_CASE("an index counts over the whole, in any dtype and across the host's chunks", "[tensor]") {
  const auto count = [](std::int64_t i) { return static_cast<double>(i % 1000); };
  const std::int64_t many = (1 << 20) + 3;
  const auto values = filled(Initializer::by_index(count), {many}, 0, 7, many - 7);
  bool all_right = true;
  for (std::size_t i = 0; i < values.size(); ++i)
    all_right = all_right && values[i] == static_cast<float>((i + 7) % 1000);
  CHECK(all_right);
  const Tensor whole = Tensor::empty({3, 4}, i64, Device::cpu());
  Initializer::by_index([](std::int64_t i) {
    return static_cast<double>(2 * i);
  }).fill(whole, {3, 4}, 0, 0);
  CHECK(whole.to_vector<std::int64_t>()[11] == 22);
  const Tensor mask = Tensor::empty({4}, boolean, Device::cpu());
  Initializer::by_index([](std::int64_t i) { return i == 2 ? 1. : 0.; }).fill(mask, {4}, 0, 0);
  CHECK(raw::cast(mask, f32).to_vector<float>() == std::vector<float>{0, 0, 1, 0});
}

TEST_CASE("a function of an index is not called on meta nor where only memory is planned",
          "[tensor]") {
  const Initializer how =
      Initializer::by_index([](std::int64_t) -> double { throw ContractError("called"); });
  for (const Device& device : {Device::meta(), Device::cpu({.executor = ExecutorKind::virtual_})}) {
    const Tensor out = Tensor::empty({3}, f32, device);
    CHECK_NOTHROW(how.fill(out, {3}, 0, 0));
  }
}

TEST_CASE("initializers that make no sense are refused where they are made", "[tensor]") {
  CHECK_THROWS_WITH(Initializer::normal(0, -1), Catch::Contains("a deviation of -1"));
  CHECK_THROWS_WITH(Initializer::normal(NAN, 1), Catch::Contains("expected finite numbers"));
  CHECK_THROWS_WITH(Initializer::uniform(1, 0), Catch::Contains("from 1 to 0"));
  CHECK_THROWS_WITH(Initializer::kaiming_normal(-1), Catch::Contains("a gain of -1"));
  CHECK_THROWS_WITH(Initializer::truncated_normal(0, 0, -1, 1), Catch::Contains("more than 0"));
  CHECK_THROWS_WITH(Initializer::truncated_normal(0, 1, 4, 5), Catch::Contains("expected 0.01"));
  CHECK_THROWS_WITH(filled(Initializer::xavier_normal(), {5}, 0, 0, 5),
                    Catch::Contains("[5] has no fans"));
  const Tensor whole_numbers = Tensor::empty({2}, i32, Device::cpu());
  CHECK_THROWS_WITH(Initializer::uniform(0, 1).fill(whole_numbers, {2}, 0, 0),
                    Catch::Contains("expected a contiguous floating one"));
}
