// Checked arithmetic, Philox and FNV against published answers, errors and the log.
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/assert.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
}

TEST_CASE("checked products and sums are right or refused") {
  CHECK(checked_mul(0, kMax) == 0);
  CHECK(checked_mul(kMax, 1) == kMax);
  CHECK(checked_mul(std::int64_t{1} << 31, std::int64_t{1} << 31) == std::int64_t{1} << 62);
  CHECK_THROWS_AS(checked_mul(std::int64_t{1} << 32, std::int64_t{1} << 31), ContractError);
  CHECK_THROWS_AS(checked_mul(kMax, 2), ContractError);
  CHECK_THROWS_AS(checked_mul(-1, 2), ContractError);
  CHECK_THROWS_AS(checked_mul(2, -1), ContractError);
  CHECK(checked_add(kMax - 1, 1) == kMax);
  CHECK_THROWS_AS(checked_add(kMax, 1), ContractError);
  CHECK_THROWS_AS(checked_add(-1, 1), ContractError);
  CHECK_THROWS_AS(round_up(kMax, 256), ContractError);

  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 10000; ++i) {  // against 128-bit arithmetic
    const auto a = static_cast<std::int64_t>(rng() >> (1 + rng() % 63));
    const auto b = static_cast<std::int64_t>(rng() >> (1 + rng() % 63));
    __extension__ using Wide = __int128;
    INFO(a << " and " << b);
    if (Wide{a} * b <= kMax)
      REQUIRE(checked_mul(a, b) == a * b);
    else
      REQUIRE_THROWS_AS(checked_mul(a, b), ContractError);
    if (b > 0) {
      REQUIRE(Wide{ceil_div(a, b)} * b >= a);
      REQUIRE((Wide{ceil_div(a, b)} - 1) * b < a);
    }
  }
}

TEST_CASE("Philox4x32-10 gives the known answers of Random123") {
  using Words = std::array<std::uint32_t, 4>;
  CHECK(philox(0, 0) == Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  CHECK(philox(~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}) ==
        Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  // The digits of pi as counter {243f6a88, 85a308d3, 13198a2e, 03707344} and key {a4093822,
  // 299f31d0}.
  CHECK(philox(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu) ==
        Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST_CASE("unit_float stays in [0, 1) and is evenly spread") {
  CHECK(unit_float(0) == 0.0f);
  CHECK(unit_float(0xffffffffu) < 1.0f);
  const std::uint64_t key = testing::fresh_seed();
  INFO("key " << key);
  constexpr int kDraws = 100000;
  double sum = 0;
  for (int i = 0; i < kDraws; ++i) sum += unit_float(philox(key, static_cast<std::uint64_t>(i))[0]);
  // The mean of n uniform draws has standard deviation 1/sqrt(12 n); six of them fail once in 5e8
  // runs.
  CHECK(sum / kDraws == Approx(0.5).margin(6 / std::sqrt(12.0 * kDraws)));
}

TEST_CASE("FNV-1a gives the published hashes") {
  CHECK(fnv1a("") == 0xcbf29ce484222325u);
  CHECK(fnv1a("a") == 0xaf63dc4c8601ec8cu);
  CHECK(fnv1a("foobar") == 0x85944171f73967e8u);
  CHECK(fnv1a("bar", fnv1a("foo")) == fnv1a("foobar"));
  CHECK(fnv1a(std::uint64_t{0x6f6f66}, fnv1a("")) == fnv1a(std::string_view("foo\0\0\0\0\0", 8)));
}

TEST_CASE("an error carries message, place and rank") {
  const auto expect_rows = [](int rows) {
    TESSERA_EXPECT(rows == 16, "gather: got ", rows, " rows, expected ", 16);
  };
  CHECK_NOTHROW(expect_rows(16));
  try {
    expect_rows(12);
    FAIL("TESSERA_EXPECT did not throw");
  } catch (const ContractError& e) {
    CHECK(std::string(e.what()) == "gather: got 12 rows, expected 16");
    CHECK(std::string(e.where().file_name()).find("base_test.cpp") != std::string::npos);
    CHECK(e.where().line() > 0);
    CHECK(e.rank() == -1);
  }
  DataError error("short file");
  error.set_rank(3);
  CHECK(error.rank() == 3);
  CHECK(dynamic_cast<const std::runtime_error*>(&error) != nullptr);
}

TEST_CASE("an error in an operation names it and the line that called it") {
  const auto fail = [] { TESSERA_EXPECT(false, "sizes differ"); };
  const auto seen = [](const auto& f) {
    try {
      f();
    } catch (const ContractError& e) {
      return std::pair(std::string(e.what()), e.where().line());
    }
    return std::pair(std::string("no error"), std::uint_least32_t{0});
  };
  const auto inner = [&](Caller at = Caller::current()) {
    const CallSite site("inner", at);
    fail();
  };
  const auto outer = [&](Caller at = Caller::current()) {
    const CallSite site("outer", at);
    const CallSite part("part");  // has no line of its own
    fail();
  };
  const auto line = std::source_location::current().line();
  CHECK(seen([&] { inner(); }) == std::pair(std::string("inner: sizes differ"), line + 1));
  CHECK(seen([&] { outer(); }) == std::pair(std::string("outer: sizes differ"), line + 2));
  CHECK(seen(fail).first == "sizes differ");  // the scopes have ended
  const CallSite site("sizes");
  CHECK(seen([] { TESSERA_EXPECT(false, "sizes: 1 and 2"); }).first == "sizes: 1 and 2");
  CHECK(seen(fail).first == "sizes: sizes differ");
}

TEST_CASE("concat joins anything that can be streamed") {
  CHECK(concat("rank ", 3, ": ", 1.5, ' ', std::string("GiB")) == "rank 3: 1.5 GiB");
}

TEST_CASE("a failed assertion names its condition") {
  CHECK_THROWS_WITH(detail::fail_assert("a < b", std::source_location::current()),
                    Catch::Contains("a < b") && Catch::Contains("base_test.cpp"));
}

TEST_CASE("messages go to the sink and nowhere without one") {
  std::vector<std::pair<LogLevel, std::string>> seen;
  log(LogLevel::error, "nobody listens");
  set_log_sink(
      [&](LogLevel level, const std::string& message) { seen.emplace_back(level, message); });
  log(LogLevel::info, "one");
  log(LogLevel::warning, "two");
  set_log_sink({});
  log(LogLevel::error, "three");
  REQUIRE(seen.size() == 2);
  CHECK(seen[0] == std::pair{LogLevel::info, std::string("one")});
  CHECK(seen[1] == std::pair{LogLevel::warning, std::string("two")});
}
