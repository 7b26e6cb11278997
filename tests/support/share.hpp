// How many of its places or steps a test tries, and of the cells of a grid: the shares that
// TRY_ONE_IN=N and TRY_ONE_CELL_IN=N say, which tools/suites.py reads from tests/shares.txt. Which
// ones depends on SEED_BASE alone (seed.hpp). Without them all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "tests/support/seed.hpp"

namespace tessera::testing {

inline std::uint64_t share_in(const char* name) {
  const char* const text = std::getenv(name);
  return text ? std::max<std::uint64_t>(1, std::strtoull(text, nullptr, 10)) : 1;
}

// One place in so many is tried.
inline std::uint64_t stride() {
  static const std::uint64_t stride = share_in("TRY_ONE_IN");
  return stride;
}

// The first of `places` that is tried.
inline std::uint64_t first_place(std::uint64_t places) {
  return 1 + derived_seed("places") % std::clamp<std::uint64_t>(places, 1, stride());
}

// How many trials there are at least of `all`; a share rounds down in each of its plans, which
// takes less than half of it.
inline std::uint64_t at_least(std::uint64_t all) {
  return stride() > 1 ? all / (2 * stride()) : all;
}

// The trials of a grid: of each few neighbours one, or all of them.
class GridShare {
 public:
  static std::uint64_t stride() {
    static const std::uint64_t cells = share_in("TRY_ONE_CELL_IN");
    return cells;
  }
  // Whether the next trial is done.
  bool takes() {
    const std::uint64_t place = next_++ % stride();
    if (place == 0) taken_ = draw_() % stride();
    return place == taken_;
  }
  // Those of the next trials that are done.
  std::vector<int> of(const std::vector<int>& trials) {
    std::vector<int> done;
    for (const int trial : trials)
      if (takes()) done.push_back(trial);
    return done;
  }

 private:
  std::mt19937_64 draw_{derived_seed("cells")};
  std::uint64_t next_ = 0, taken_ = 0;
};

// The steps of a long run; under sanitizers, which count nothing that could grow, at most 50 or a
// fifth of a share's.
inline int long_run(int steps) {
  const int share = stride() > 1 ? steps / 10 : steps;
  const int fifth = share / std::max(1, static_cast<int>(stride() / 40));
  return std::max(fifth, std::min(share, 50));
}

}  // namespace tessera::testing
