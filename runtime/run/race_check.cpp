#include "tessera/run/race_check.hpp"

#include <string_view>

#include "tessera/base/error.hpp"

namespace tessera {

std::shared_ptr<RaceChecker> race_checker_from(const EnvironmentLookup& lookup) {
  const char* const value = lookup("TESSERA_CHECK");
  const std::string_view text = value ? value : "";
  if (text.empty() || text == "0") return nullptr;
  if (text != "1")
    throw DataError(concat("TESSERA_CHECK='", text,
                           "' is neither 0 nor 1; set 1 to look for races, or unset it"));
  return RaceChecker::make();
}

}  // namespace tessera
