// A TOML file as a flat list of keys and plain values, in the order of its lines. Keeps toml++,
// which is slow to compile, in one file; knows nothing of what the keys mean.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tools/train/schema.hpp"

namespace tessera::train {

struct TomlItem {
  std::string section;  // empty for a key above the first [section]
  std::string name;
  Value value;  // monostate for what is no plain value: an array, a date, a table in a table
  std::optional<std::string> names;  // of an array of texts, with commas between them
  std::string shown;                 // the value for an error message
  std::size_t line = 0;
  bool is_empty_section = false;  // without keys, and so without a name and a value
};

// Throws: DataError if the file cannot be read ("configuration file ...") or is no TOML
// ("FILE:LINE: ...").
std::vector<TomlItem> read_toml(const std::string& path);

}  // namespace tessera::train
