#include "tools/train/toml_reader.hpp"

#include <toml++/toml.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"

namespace tessera::train {
namespace {

TomlItem item_of(std::string section, std::string name, const toml::node& node) {
  TomlItem item{.section = std::move(section),
                .name = std::move(name),
                .value = {},
                .names = {},
                .shown = {},
                .line = node.source().begin.line,
                .is_empty_section = false};
  if (const auto* text = node.as_string()) {
    item.value = text->get();
    item.shown = concat('"', text->get(), '"');
  } else if (const auto* flag = node.as_boolean()) {
    item.value = flag->get();
    item.shown = flag->get() ? "true" : "false";
  } else if (const auto* integer = node.as_integer()) {
    item.value = integer->get();
    item.shown = concat(integer->get());
  } else if (const auto* real = node.as_floating_point()) {
    item.value = real->get();
    item.shown = concat(real->get());
    if (item.shown.find_first_not_of("-0123456789") == std::string::npos) item.shown += ".0";
  } else {
    const auto* array = node.as_array();
    if (array && (array->empty() || array->is_homogeneous<std::string>())) {
      std::string names;
      for (const toml::node& text : *array) names += concat(",", text.as_string()->get());
      item.names = names.substr(std::min<std::size_t>(1, names.size()));
    }
    item.shown = node.is_array() ? "an array" : node.is_table() ? "a table" : "a date or time";
  }
  return item;
}

// Whether `name` is a section, or the beginning of the name of one.
bool holds_sections(const std::string& name) {
  for (const std::string_view section : sections())
    if (section.starts_with(name) && (section.size() == name.size() || section[name.size()] == '.'))
      return true;
  return false;
}

void append_section(std::vector<TomlItem>& items, const std::string& section,
                    const toml::table& table) {
  if (table.empty()) {
    items.push_back({.section = section,
                     .name = {},
                     .value = {},
                     .names = {},
                     .shown = {},
                     .line = table.source().begin.line,
                     .is_empty_section = true});
  }
  for (const auto& [key, node] : table) {
    const std::string name = concat(section, ".", key.str());
    const toml::table* inner = node.as_table();
    if (inner && holds_sections(name))
      append_section(items, name, *inner);
    else
      items.push_back(item_of(section, std::string(key.str()), node));
  }
}

// Read to its end: the system's own files, such as those in /proc, do not tell their size.
std::string contents_of(const std::string& path) {
  constexpr std::size_t kMost = 1 << 20;
  const OpenFile file(path, "configuration file");
  std::string text(kMost, '\0');
  text.resize(file.read_some(0, std::as_writable_bytes(std::span(text))));
  if (text.size() == kMost)
    throw DataError(concat("configuration file '", path, "' has ", kMost,
                           " bytes or more; is it the right file?"));
  return text;
}

// toml++ 3.3 takes tables within tables apart by recursion without a limit, and each dot outside of
// strings makes one.  Throws: DataError for a line with more of them than any option has.
void expect_shallow(const std::string& text, const std::string& path) {
  constexpr int kMostDots = 32;
  int line = 1, dots = 0;
  std::string_view end;  // of the string or comment that it is in
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(1)) {
    const char c = rest[0];
    if (c == '\n') ++line, dots = 0;
    if (!end.empty()) {
      if (end[0] == '"' && c == '\\' && rest.size() > 1 && rest[1] != '\n') {
        rest.remove_prefix(1);
      } else if (rest.starts_with(end)) {
        rest.remove_prefix(end.size() - 1);
        for (int more = 0; end.size() == 3 && more < 2 && rest.substr(1).starts_with(end[0]);
             ++more)
          rest.remove_prefix(1);  // it may end with two quotes of its own
        end = {};
      } else if (c == '\n' && end.size() == 1) {
        end = {};  // not TOML, as the parser will say
      }
    } else if (c == '"' || c == '\'') {
      const bool is_long = rest.starts_with(c == '"' ? "\"\"\"" : "'''");
      end = rest.substr(0, is_long ? 3 : 1);
      rest.remove_prefix(end.size() - 1);
    } else if (c == '#') {
      end = "\n";
    } else if (c == '.' && ++dots > kMostDots) {
      throw DataError(concat(path, ":", line, ": more than ", kMostDots,
                             " dots in a line; no option lies so deep"));
    }
  }
}

}  // namespace

std::vector<TomlItem> read_toml(const std::string& path) {
  const std::string text = contents_of(path);
  expect_shallow(text, path);
  std::vector<TomlItem> items;
  try {
    const toml::table root = toml::parse(std::string_view(text), path);
    for (const auto& [key, node] : root) {
      const std::string name(key.str());
      if (const toml::table* table = node.as_table())
        append_section(items, name, *table);
      else
        items.push_back(item_of({}, name, node));
    }
  } catch (const toml::parse_error& error) {
    throw DataError(
        concat(path, ":", error.source().begin.line, ": not TOML: ", error.description()));
  }
  // Tables iterate by name; the first error to be reported is the first in the file.
  std::stable_sort(items.begin(), items.end(),
                   [](const auto& a, const auto& b) { return a.line < b.line; });
  return items;
}

}  // namespace tessera::train
