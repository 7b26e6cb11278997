// What ranks compare on the host, where it may differ.
#pragma once

#include <initializer_list>
#include <string_view>
#include <utility>

#include "tessera/base/philox.hpp"
#include "tessera/comm/group.hpp"

namespace tessera::comm {

// The least and the most of all values of the ranks of one group, or of several that make a grid;
// null ones do not count. Collective; `name`, of static lifetime, is what a rank hears of that
// peers compare, while it does something else.
inline std::pair<double, double> least_and_most(std::initializer_list<const RankGroup*> groups,
                                                double value, const char* name) {
  double ends[] = {-value, value};
  for (const RankGroup* const group : groups)
    if (group && group->size() > 1) group->max(ends, name);
  return {-ends[0], ends[1]};
}

// What tells texts apart: of a hash 53 bits, which travel exactly.
inline double number_of(std::string_view text) { return static_cast<double>(fnv1a(text) >> 11); }

}  // namespace tessera::comm
