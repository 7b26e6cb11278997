#include "tessera/nn/select.hpp"

#include <fnmatch.h>

#include <algorithm>

namespace tessera::nn {

std::vector<Parameter> select(const Module& module, const std::vector<std::string>& patterns) {
  const auto named = module.named_parameters();
  const auto fits = [](const std::string& pattern, const std::string& name) {
    return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  for (const std::string& pattern : patterns)
    TESSERA_EXPECT(
        std::ranges::any_of(named, [&](const auto& p) { return fits(pattern, p.first); }),
        "select: no parameter's name fits '", pattern, "'",
        named.empty() ? "" : concat("; one name is '", named.back().first, "'"));
  std::vector<Parameter> found;
  for (const auto& [name, parameter] : named)
    if (std::ranges::any_of(patterns, [&](const std::string& p) { return fits(p, name); }))
      found.push_back(parameter);
  return found;
}

}  // namespace tessera::nn
