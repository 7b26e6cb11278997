// How a row of the table of options finds its field in Config: its type, and both ways between
// field and value. Private to the tables.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tools/train/schema.hpp"

namespace tessera::train {

inline constexpr double kMaxSize =
    1 << 24;  // dimensions and batches: their products stay far below 2^63
inline constexpr double kMaxCount = 1ll << 40;  // steps
inline constexpr double kMaxBytes = 1ll << 50;
inline constexpr double kMaxSeed =
    1ll << 53;  // what a JSON or TOML reader elsewhere still reads exactly

constexpr Range between(double low, double high) { return {low, high, false, false}; }
constexpr Range at_least(double low) { return {.low = low}; }
constexpr Range above(double low) { return {.low = low, .above_low = true}; }
constexpr Range fraction() { return {0, 1, false, true}; }

template <class T>
struct Optional : std::false_type {
  using Type = T;
};
template <class T>
struct Optional<std::optional<T>> : std::true_type {
  using Type = T;
};

template <class T>
constexpr ValueType type_of() {
  if constexpr (std::is_same_v<T, bool>)
    return ValueType::boolean;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return ValueType::integer;
  else if constexpr (std::is_same_v<T, double>)
    return ValueType::real;
  else if constexpr (std::is_same_v<T, std::string>)
    return ValueType::text;
  else {
    static_assert(std::is_enum_v<T> || std::is_same_v<T, Reshard>);
    return ValueType::choice;
  }
}

inline constexpr std::array kReshards{Reshard::automatic, Reshard::always, Reshard::never};

template <class T>
Value to_value(const T& field) {
  if constexpr (Optional<T>::value)
    return field ? Value(*field) : Value();
  else if constexpr (std::is_enum_v<T>)
    return static_cast<std::int64_t>(field);
  else if constexpr (std::is_same_v<T, Reshard>)
    return field.is_partial() ? -std::int64_t{field.ranks()}
                              : std::ranges::find(kReshards, field) - kReshards.begin();
  else if constexpr (std::is_same_v<T, std::string>)
    return field.empty() ? Value() : Value(field);
  else
    return field;
}

template <class T>
void from_value(T& field, const Value& value) {
  if constexpr (std::is_enum_v<T>)
    field = static_cast<T>(std::get<std::int64_t>(value));
  else if constexpr (std::is_same_v<T, Reshard>) {
    const std::int64_t index = std::get<std::int64_t>(value);
    field = index < 0 ? Reshard::to(static_cast<int>(-index))
                      : kReshards[static_cast<std::size_t>(index)];
  } else
    field = std::get<typename Optional<T>::Type>(value);
}

// The columns that only some rows have.
struct Extra {
  Range range = {};
  std::vector<std::string_view> choices = {};
  std::string_view only_if = {}, unset = {}, argument = {};
};

// The row of "section.name", or of a flag: "name".
template <auto kSection, auto kField>
Key key(std::string_view full_name, std::string_view help, const Extra& extra = {}) {
  using Field = std::remove_cvref_t<decltype(std::declval<Config&>().*kSection.*kField)>;
  const std::size_t dot = full_name.rfind('.');
  const bool flag = dot == std::string_view::npos;
  return {.section = full_name.substr(0, flag ? 0 : dot),
          .name = full_name.substr(flag ? 0 : dot + 1),
          .help = help,
          .type = type_of<typename Optional<Field>::Type>(),
          .range = extra.range,
          .choices = extra.choices,
          .only_if = extra.only_if,
          .unset = extra.unset,
          .argument = extra.argument,
          .get = [](const Config& c) { return to_value(c.*kSection.*kField); },
          .set = [](Config& c, const Value& value) { from_value(c.*kSection.*kField, value); }};
}

// The rows of the table, in its order.
std::vector<Key> flag_keys();      // of the command line alone
std::vector<Key> training_keys();  // of what is trained: from the model to its learning rate
std::vector<Key> running_keys();   // of how that runs: from the device to what is reported

}  // namespace tessera::train
