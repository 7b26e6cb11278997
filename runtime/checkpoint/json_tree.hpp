// A JSON text as a tree that is asked for what it should be: manifests, and what the metadata of
// files says.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::checkpoint {

class JsonTree {
 public:
  using Members = std::map<std::string, JsonTree, std::less<>>;
  using Elements = std::vector<JsonTree>;
  std::variant<bool, std::int64_t, double, std::string, Elements, Members> value;

  // Throws: DataError that begins with `what`, as do all below.
  static JsonTree parse(std::string_view json, const std::string& what);

  const Members& members(const std::string& what) const;
  const Elements& elements(const std::string& what) const;
  const JsonTree& member(std::string_view name, const std::string& what) const;
  const std::string& text(const std::string& what) const;
  std::int64_t integer(const std::string& what) const;
  // Integers of at least 0.
  std::vector<std::int64_t> sizes(const std::string& what) const;
};

}  // namespace tessera::checkpoint
