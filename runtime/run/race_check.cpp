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

int close_check(const RaceChecker* checker, int rank, int code,
                const std::function<void(const std::string&)>& race,
                const std::function<void(const std::string&)>& summary) {
  if (checker == nullptr) return code;
  for (const Race& found : checker->races()) race(found.to_string());
  if (rank == 0) summary(checker->summary());
  return code == 0 && checker->race_count() > 0 ? 1 : code;
}

}  // namespace tessera
