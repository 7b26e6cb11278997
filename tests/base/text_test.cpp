// JSON against a reader of another make, numbers for people, and what exceptions say.
#include "tessera/detail/base/text.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

// `text` with U+FFFD for each byte that no well-formed sequence begins with or covers.
std::string mended(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    out += length == 0 ? "\xef\xbf\xbd" : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

std::string described(const auto& thrown) {
  return describe_exception(std::make_exception_ptr(thrown));
}

}  // namespace

TEST_CASE("any bytes become a JSON string of one line that reads back") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  const std::string_view pieces[] = {"\"",           "\\",
                                     "\n",           "\x7f",
                                     "\xc3\xa9",     "\xe2\x82\xac",
                                     "\xed\xa0\x80", "\xf0\x9f\x98\x80",
                                     "\xf0\x9f",     "a"};
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (std::size_t n = rng() % 12; n > 0; --n) {
      if (rng() % 2 == 0)
        text += pieces[rng() % std::size(pieces)];
      else
        text += static_cast<char>(rng() % 256);
    }
    const std::string quoted = json::quote(text);
    CAPTURE(quoted);
    REQUIRE(nlohmann::json::parse(quoted).get<std::string>() == mended(text));
    REQUIRE(quoted.find('\n') == std::string::npos);
  }
  CHECK(json::quote("a\"\x01\xff") == "\"a\\\"\\u0001\xef\xbf\xbd\"");
}

TEST_CASE("JSON numbers read back to the same value, and what JSON lacks is null") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 2000; ++i) {
    const double value = std::bit_cast<double>(rng());
    if (std::isfinite(value)) REQUIRE(nlohmann::json::parse(json::number(value)) == value);
  }
  CHECK(json::number(0.1) == "0.1");
  CHECK(json::number(std::numeric_limits<double>::infinity()) == "null");
  CHECK(json::number(std::nan("")) == "null");
  CHECK(json::number(std::numeric_limits<std::int64_t>::min()) == "-9223372036854775808");
  CHECK(json::number(std::optional<double>()) == "null");
  CHECK(json::number(std::optional<std::int64_t>(7)) == "7");
}

TEST_CASE("commas stand between thousands") {
  CHECK(with_commas("999") == "999");
  CHECK(with_commas("1000") == "1,000");
  CHECK(with_commas("-1234567") == "-1,234,567");
  CHECK(with_commas("1234567.8901") == "1,234,567.8901");
  CHECK(with_commas("nan") == "nan");
}

TEST_CASE("whatever is thrown can be quoted, and an error of ours learns its rank") {
  CHECK(described(std::runtime_error("why")) == "why");
  CHECK(described(3) == "an exception that is no std::exception");
  const auto error = std::make_exception_ptr(CommError("lost"));
  for (const int rank : {2, 5}) {  // the first one stays
    CHECK(describe_exception(error, rank) == "lost");
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      CHECK(e.rank() == 2);
    }
  }
  try {
    throw DataError("in flight");
  } catch (...) {
    CHECK(describe_exception() == "in flight");
  }
}

TEST_CASE("what is no UTF-8 is replaced, byte by byte, and nothing else") {
  CHECK(as_utf8("a\n\t\xe2\x82\xac") == "a\n\t\xe2\x82\xac");
  CHECK(as_utf8("\xff\xe2\x82!") == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd!");
  CHECK(is_utf8(as_utf8(std::string("\x00\xc0\xaf\xed\xa0\x80", 6))));
}

TEST_CASE("what a message quotes keeps its head and its tail, and whole characters") {
  CHECK(shortened("") == "");
  CHECK(shortened(std::string(200, 'a')) == std::string(200, 'a'));
  CHECK(shortened("/head/" + std::string(500, 'a') + "/tail") ==
        "/head/" + std::string(114, 'a') + "..." + std::string(55, 'a') + "/tail");
  for (const std::string_view c : {"\xe2\x82\xac", "\xf0\x9f\x98\x80", "\x80", "\xff"}) {
    for (std::size_t first = 0; first < 4; ++first) {
      std::string text(first, 'a');
      while (text.size() < 1000) text += c;
      const std::string cut = shortened(text);
      CHECK(cut.size() > 150);
      CHECK(cut.size() <= 183);
      if (is_utf8(c)) CHECK(is_utf8(cut));
    }
  }
}

TEST_CASE("an error shortens words and quotations, and no sentence") {
  const std::string lines(3000, '.'), many = [] {
    std::string text = "a ledger:\n";
    for (int i = 0; i < 500; ++i) text += "rank " + std::to_string(i) + " can't, 'w' is\n";
    return text;
  }();
  CHECK(std::string(ContractError(many).what()) == many);
  const std::string path = "/a b/" + std::string(1000, 'c') + " it's d";
  const std::string said = ContractError("load: '" + path + "' can't be read: why").what();
  CHECK(said.starts_with("load: '/a b/cc"));
  CHECK(said.ends_with("cc it's d' can't be read: why"));
  CHECK(said.size() < 260);
  CHECK(std::string(DataError("x=" + lines + " ends").what()).ends_with(". ends"));
  CHECK(std::string(DataError("'" + lines).what()).size() < 200);
  CHECK(std::string(DataError(" \n ").what()) == " \n ");
}
