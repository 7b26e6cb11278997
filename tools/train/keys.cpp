// What is done with a key of the table, whichever it is: looked up, also where it is misspelt, and
// put into words.
#include <algorithm>
#include <limits>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr std::size_t kMaxMisspelt = 100;  // bounds the time that a suggestion takes

// Optimal string alignment distance. Source: Damerau 1964; the dynamic programme is Wagner and
// Fischer's.
int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> cost(a.size() + 1, std::vector<int>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = static_cast<int>(i + j);
        continue;
      }
      const bool same = a[i - 1] == b[j - 1];
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + !same});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string Key::full_name() const {
  return section.empty() ? std::string(name) : concat(section, ".", name);
}

std::string Key::expected() const {
  if (type == ValueType::boolean) return "true or false";
  if (type == ValueType::text) return "a text that is not empty";
  if (type == ValueType::choice) {
    std::string all;
    for (const std::string_view choice : choices) all += concat(all.empty() ? "" : ", ", choice);
    if (has_number())
      all += concat(" or a whole number from ", range.low, " to ",
                    static_cast<std::int64_t>(range.high));
    return choices.size() == 1 ? all : concat("one of ", all);
  }
  const auto bound = [&](double value) {
    return type == ValueType::integer ? concat(static_cast<std::int64_t>(value))
                                      : json::number(value);
  };
  std::string text = type == ValueType::integer ? "a whole number" : "a number";
  const bool has_high = range.high < std::numeric_limits<double>::infinity();
  if (range.above_low)
    text += concat(" above ", bound(range.low));
  else
    text += concat(has_high ? " from " : " of at least ", bound(range.low));
  if (has_high) text += concat(range.below_high ? " to below " : " to ", bound(range.high));
  return text;
}

const Key* find_key(std::string_view full_name) {
  for (const Key& key : schema()) {
    if (key.full_name() == full_name) return &key;
  }
  return nullptr;
}

bool applies(const Key& key, const Config& config) {
  if (key.only_if.empty()) return true;
  const std::size_t equals = key.only_if.find('=');
  const bool negated = key.only_if[equals - 1] == '!';
  const Key* other = find_key(key.only_if.substr(0, equals - (negated ? 1 : 0)));
  TESSERA_EXPECT(other, "schema: '", key.only_if, "' names no key");
  return (shown_value(*other, other->get(config)) == key.only_if.substr(equals + 1)) != negated;
}

std::string_view nearest(std::string_view misspelt,
                         const std::vector<std::string_view>& candidates) {
  const auto closer = [&](std::string_view a, std::string_view b) {
    return edit_distance(misspelt.substr(0, kMaxMisspelt), a) <
           edit_distance(misspelt.substr(0, kMaxMisspelt), b);
  };
  return *std::min_element(candidates.begin(), candidates.end(), closer);
}

std::string nearest_key(std::string_view misspelt) {
  misspelt = misspelt.substr(0, kMaxMisspelt);
  const std::size_t dot = misspelt.rfind('.');
  const bool has_section = dot != std::string_view::npos;
  const std::string_view section = misspelt.substr(0, has_section ? dot : 0);
  const std::string_view last = has_section ? misspelt.substr(dot + 1) : misspelt;
  const std::vector<std::string_view> all = sections();
  const bool right_section = std::find(all.begin(), all.end(), section) != all.end();
  const Key* best = nullptr;
  int best_distance = std::numeric_limits<int>::max();
  for (const Key& key : schema()) {
    // A right name in a wrong section counts as two typing errors, in no section as none; a right
    // section is believed.
    int distance = edit_distance(last, key.name) + (has_section && key.section != section ? 2 : 0);
    if (right_section && key.section != section && key.name != last) continue;
    if (!right_section) distance = std::min(distance, edit_distance(misspelt, key.full_name()));
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = &key;
  }
  return best->full_name();
}

std::vector<std::string_view> sections() {
  std::vector<std::string_view> names;
  for (const Key& key : schema()) {
    if (!key.section.empty() && (names.empty() || names.back() != key.section))
      names.push_back(key.section);
  }
  return names;
}

std::string shown_value(const Key& key, const Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* real = std::get_if<double>(&value)) return json::number(*real);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return key.type == ValueType::choice
               ? *integer < 0 ? concat(-*integer)
                              : std::string(key.choices.at(static_cast<std::size_t>(*integer)))
               : concat(*integer);
  }
  return {};
}

}  // namespace tessera::train
