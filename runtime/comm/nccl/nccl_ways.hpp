// How gathers and reductions of a group run where NcclOptions leave that open: each way is timed
// beside compute, at the size of the job's largest unit, and rank 0's medians decide.
#pragma once

#include <string_view>

#include "kernels/nccl/nccl_driver.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class NcclGroup;

// What the communicators of a group's roles are made with.
struct NcclWays {
  bool has_zero_ctas = false;  // of gathers
  int reduce_ctas = 0;         // at most; 0: as many as NCCL wants
  bool operator==(const NcclWays&) const = default;
  kernels::NcclShape shape_of(std::string_view role) const;
};

// Whether options leave a way open.
constexpr bool leaves_ways_open(const NcclOptions& options) {
  return options.gather_policy == GatherPolicy::measured ||
         options.reduce_max_ctas == NcclOptions::kMeasuredCtas;
}
// What options say; what they leave open is NCCL's own.
NcclWays given_ways(const NcclOptions& options);

// Measures what is left open, of calls that come (their size is not 0), leaves `group` with what
// was chosen, and logs a line on its first rank. `ranks` is its handle. Collective, and nothing is
// under way.
void measure_ways(NcclGroup& group, const RankGroup& ranks, const RankGroup::Sizes& sizes);

}  // namespace tessera::comm
