// JSON from outside: what a document says, in its order, and everything that is refused.
#include "runtime/base/json_reader.hpp"

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using tessera::testing::has;

namespace {

// All that it is told, in short.
class Heard final : public json::Reader {
 public:
  std::string all;

  void begin_object() override { all += '{'; }
  void end_object() override { all += '}'; }
  void begin_array() override { all += '['; }
  void end_array() override { all += ']'; }
  void key(std::string name) override { all += concat(name, ':'); }
  void string(std::string text) override {
    if (text == "no") refuse("says no");
    all += concat('\'', text, '\'');
  }
  void count(std::int64_t value) override { all += concat('#', value); }
  void other() override { all += '?'; }
};

std::string heard(std::string_view text) {
  Heard reader;
  json::read(text, "it", reader);
  return reader.all;
}

std::string fault(std::string_view text) {
  Heard reader;
  try {
    json::read(text, "it", reader);
  } catch (const DataError& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("a document is told in its order, and positions do not matter to it", "[base]") {
  CHECK(heard(R"( {"a":[1, 9223372036854775807 ,{}],"b" : "x\u00e9\ud83d\ude00\n"} )") ==
        "{a:[#1#9223372036854775807{}]b:'x\u00e9\U0001f600\n'}");
  CHECK(heard("[-1,-0,1.0,1e3,true,false,null]") == "[???????]");
  CHECK(heard("7") == "#7");
  CHECK(heard(R"([{"a":1},{"a":2}])") == "[{a:#1}{a:#2}]");  // a key of two objects
  CHECK(heard(std::string(64, '[') + std::string(64, ']')).size() == 128);
}

TEST_CASE("what is no JSON, or beyond the limits, is refused with its byte", "[base]") {
  const struct {
    std::string_view text;
    const char* expected;
  } cases[] = {
      {"\xef\xbb\xbf{}", "it that begins with a byte order mark (byte 0 of the JSON)"},
      {{"{}\0", 3}, "it that goes on after its end (byte 2"},
      {{"{\0}", 3}, "lacks '\"' (byte 1"},
      {{"[\"a\0\"]", 6}, "has a control character in a string (byte 3"},
      {"{} x", "goes on after its end (byte 3"},
      {R"({"a":1,"a":2})", "names 'a' twice (byte 10"},
      {"[9223372036854775808]", "has a number beyond 64 bits (byte 1"},
      {"[99999999999999999999]", "has a number beyond 64 bits (byte 1"},
      {"[-99999999999999999999]", "has a number beyond 64 bits (byte 1"},
      {R"({"a" 1})", "lacks ':' (byte 5"},
      {R"({"a":1)", "lacks '}' (byte 6"},
      {R"({"a":1 2})", "lacks '}' (byte 7"},
      {"[1 2]", "lacks ']' (byte 3"},
      {"[01]", "lacks ']' (byte 2"},
      {"[1,]", "lacks a value (byte 3"},
      {R"({"a":})", "lacks a value (byte 5"},
      {"", "lacks a value (byte 0"},
      {"[+1]", "lacks a value"},
      {"[nul]", "lacks a value"},
      {R"(["; expected ':')", "has a string without an end"},
      {"[\"\xc3(\"]", "is not UTF-8"},
      {R"(["\ud800"])", "has half a surrogate pair"},
      {R"(["\u12g4"])", "four hexadecimal digits"},
      {R"(["\q"])", "has an unknown escape"},
      {R"([1,{"a":"no"}])", "it that says no (byte 8 of the JSON); write the file again"},
  };
  for (const auto& [text, expected] : cases) {
    INFO(text);
    const std::string said = fault(text);
    INFO(said);
    CHECK(has(said, expected));
  }
  CHECK(has(fault(std::string(65, '[')), "has more than 64 levels (byte 64"));
  CHECK(has(fault(std::string(1'000'000, '[')), "has more than 64 levels"));
}
