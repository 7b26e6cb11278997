#include "runtime/base/json_reader.hpp"

// All of nlohmann-json is internal to this file: a program may have one of its own, with other
// options and another version.
#define NLOHMANN_JSON_NAMESPACE_BEGIN \
  namespace nlohmann {                \
  inline namespace {
#define NLOHMANN_JSON_NAMESPACE_END \
  }                                 \
  }
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::json {
namespace {

struct Refused {
  std::string fault;
};

// The text, which says how much of it was taken: nlohmann's events have no positions.
struct Taken {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  std::string_view::const_iterator at;
  std::size_t* count;

  const char& operator*() const { return *at; }
  Taken& operator++() {
    ++at;
    ++*count;
    return *this;
  }
  bool operator==(const Taken& other) const { return at == other.at; }
  bool operator!=(const Taken& other) const { return at != other.at; }
};

// What is wrong with a string, in nlohmann's words and in ours.
constexpr std::pair<std::string_view, std::string_view> kStrings[] = {
    {"ill-formed UTF-8", "is not UTF-8"},
    {"control character", "has a control character in a string"},
    {"forbidden character after backslash", "has an unknown escape"},
    {"must be followed by 4 hex digits", "has a \\u escape without four hexadecimal digits"},
    {"surrogate", "has half a surrogate pair"},
    {"missing closing quote", "has a string without an end"}};
// What was expected where the document goes on otherwise; these words end nlohmann's message.
constexpr std::pair<std::string_view, std::string_view> kExpected[] = {
    {"; expected string literal", "lacks '\"'"},
    {"; expected ':'", "lacks ':'"},
    {"; expected '}'", "lacks '}'"},
    {"; expected ']'", "lacks ']'"}};

// nlohmann's events, checked, as the reader's.
class Events {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  Events(std::string_view text, const std::size_t& taken, Reader& reader)
      : text_(text), taken_(taken), reader_(reader) {}

  std::size_t byte() const noexcept { return byte_; }

  bool start_object(std::size_t) {
    begin(taken_);
    reader_.begin_object();
    return enter();
  }
  bool start_array(std::size_t) {
    begin(taken_);
    reader_.begin_array();
    return enter();
  }
  bool end_object() {
    begin(taken_);
    keys_.pop_back();
    reader_.end_object();
    return true;
  }
  bool end_array() {
    begin(taken_);
    keys_.pop_back();
    reader_.end_array();
    return true;
  }
  bool key(string_t& name) {
    begin(taken_);
    byte_ = end_;
    if (!keys_.back().insert(name).second) throw Refused{concat("names ", shown(name), " twice")};
    reader_.key(std::move(name));
    return true;
  }
  bool string(string_t& text) {
    begin(taken_);
    reader_.string(std::move(text));
    return true;
  }
  bool number_unsigned(number_unsigned_t value) {
    begin(taken_ - 1);  // what follows is looked at, too
    if (value > INT64_MAX) throw Refused{"has a number beyond 64 bits"};
    reader_.count(static_cast<std::int64_t>(value));
    return true;
  }
  bool number_integer(number_integer_t value) {
    begin(taken_ - 1);
    reader_.negative(value);
    return true;
  }
  bool number_float(number_float_t value, const string_t& digits) {
    begin(taken_ - 1);
    if (digits.find_first_not_of("-0123456789") == digits.npos)
      throw Refused{"has a number beyond 64 bits"};
    reader_.number(value);
    return true;
  }
  bool boolean(bool value) {
    begin(taken_);
    reader_.boolean(value);
    return true;
  }
  bool null() { return other(taken_); }
  bool binary(binary_t&) { return other(taken_); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) {
    byte_ = std::min(position - 1, text_.size());
    const std::string_view said = error.what();
    const auto part = [&](std::string_view head) {
      const std::size_t at = said.find(head);
      return at == said.npos ? std::string_view() : said.substr(at + head.size());
    };
    if (said.ends_with("; expected end of input")) throw Refused{"goes on after its end"};
    const std::string_view of_string = part(" - invalid string: ");
    for (const auto& [theirs, ours] : kStrings)
      if (of_string.substr(0, of_string.find("; last read")).find(theirs) != of_string.npos)
        throw Refused{std::string(ours)};
    const std::string_view context = part("while parsing ");
    if (context.starts_with("value ") || context.starts_with("array ")) reader_.other();
    for (const auto& [theirs, ours] : kExpected)
      if (said.ends_with(theirs)) throw Refused{std::string(ours)};
    throw Refused{"lacks a value"};
  }

 private:
  // The next thing, to which all before `end` belongs.
  void begin(std::size_t end) {
    byte_ = std::min(text_.find_first_not_of(" \t\r\n:,", end_), text_.size());
    end_ = end;
  }
  bool enter() {
    if (keys_.size() == kMostLevels)
      throw Refused{concat("has more than ", kMostLevels, " levels")};
    keys_.emplace_back();
    return true;
  }
  bool other(std::size_t end) {
    begin(end);
    reader_.other();
    return true;
  }

  std::string_view text_;
  const std::size_t& taken_;
  Reader& reader_;
  std::vector<std::set<std::string>> keys_;  // of each level
  std::size_t byte_ = 0, end_ = 0;           // where the last thing begins and ends
};

}  // namespace

void Reader::refuse(std::string fault) { throw Refused{std::move(fault)}; }

void read(std::string_view text, std::string_view document, Reader& reader) {
  std::size_t taken = 0;
  Events events(text, taken, reader);
  const auto fail = [&](const std::string& fault, std::size_t byte) {
    throw DataError(
        concat(document, " that ", fault, " (byte ", byte, " of the JSON); write the file again"));
  };
  // nlohmann passes over the one, and ends at the other.
  if (text.starts_with("\xef\xbb\xbf")) fail("begins with a byte order mark", 0);
  try {
    nlohmann::json::sax_parse(Taken{text.begin(), &taken}, Taken{text.end(), nullptr}, &events);
  } catch (const Refused& refused) {
    fail(refused.fault, events.byte());
  }
  if (const std::size_t nul = text.find('\0'); nul != text.npos) fail("goes on after its end", nul);
}

}  // namespace tessera::json
