// What the race checker says, in words.
#include "tessera/base/error.hpp"
#include "tessera/device/observe/race_checker.hpp"

namespace tessera {

std::string RaceChecker::summary() const {
  const std::uint64_t races = race_count();
  return concat("race checker: ", operations(), " operations, ", races,
                races == 1 ? " race" : " races");
}

std::string Race::to_string() const {
  const auto show = [](const RaceSide& s) {
    return s.stream == "host" ? concat("the host of rank ", s.rank)
                              : concat("'", s.operation, "' on ", s.stream, " (rank ", s.rank,
                                       ", tick ", s.tick, ")");
  };
  const auto verb = [](const RaceSide& s) { return s.mode == AccessMode::read ? "read" : "write"; };
  const std::string what =
      concat(bytes, " bytes", owner.empty() ? std::string() : concat(" of '", owner, "'"));
  switch (kind) {
    case RaceKind::conflict:
      return concat("race on ", what, ": ", show(later), " may ", verb(later), " while ",
                    show(earlier), " may ", verb(earlier), " them; ", missing_edge);
    case RaceKind::reuse:
      return concat("reuse of ", what, ": handed out on ", later.stream, " (rank ", later.rank,
                    ", tick ", later.tick, ") while ", show(earlier), " may ", verb(earlier),
                    " them; ", missing_edge);
    case RaceKind::use_after_free:
      return concat("use of ", what, " after they were given back: ", show(later), " may ",
                    verb(later), " them; ", missing_edge);
    case RaceKind::early_release:
      break;
  }
  return concat("release of ", what, " to the system while ", show(earlier), " may ", verb(earlier),
                " them; ", missing_edge);
}

}  // namespace tessera
