// The one table of all options: name, type, range, default, help, and the field of Config behind
// it. Parsing, --help,
// --print-config and the suggestions for misspelt keys all come from it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/train/config.hpp"

namespace tessera::train {

// A value on its way between text and field; monostate is "not set". A choice is its index, and a
// number where a key has choices or a number is below 0: 8 is -8.
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string>;

enum class ValueType : std::uint8_t { boolean, integer, real, text, choice };

// From low to high, both included unless said otherwise.
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool above_low = false, below_high = false;  // the bound itself is left out
};

struct Key {
  std::string_view section;  // empty: a flag, on the command line only
  std::string_view name;
  std::string_view help;
  ValueType type = ValueType::text;
  Range range;
  std::vector<std::string_view> choices;
  bool has_number() const noexcept { return type == ValueType::choice && range.low > 0; }
  std::string_view
      only_if;  // "section.key=choice" or "section.key!=choice": elsewhere the key has no meaning
  std::string_view unset;     // what stands in while the key is not set
  std::string_view argument;  // what --help calls the value
  Value (*get)(const Config&) = nullptr;
  void (*set)(Config&, const Value&) = nullptr;

  std::string full_name() const;  // "section.name", or "name" of a flag
  std::string expected() const;   // "a whole number from 1 to 4096"
};

const std::vector<Key>& schema();

// Null where there is none.
const Key* find_key(std::string_view full_name);

// The names of the sections, in the order of the table.
std::vector<std::string_view> sections();

// Whether the key has a meaning in this configuration.
bool applies(const Key& key, const Config& config);

// The full name of the key that is least far from a misspelt one, which may lack its section or
// have a wrong one.
std::string nearest_key(std::string_view misspelt);

// The candidate with the smallest edit distance: characters inserted, removed, replaced, or swapped
// with their neighbour. Requires: candidates.
std::string_view nearest(std::string_view misspelt,
                         const std::vector<std::string_view>& candidates);

// A value as --help and error messages show it; empty for one that is not set.
std::string shown_value(const Key& key, const Value& value);

}  // namespace tessera::train
