// How many of its places or steps a test tries: the share that TRY_ONE_IN=N in the environment of
// its suite says (tests/meson.build), and of the cells of a grid TRY_ONE_CELL_IN=N
// (tools/suites.py); all of them with SOAK=1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

namespace tessera::testing {

inline std::uint64_t share_in(const char* name) {
  const char* const soak = std::getenv("SOAK");
  const char* const text = std::getenv(name);
  if (!text || (soak && std::string_view(soak) == "1")) return 1;
  return std::max<std::uint64_t>(1, std::strtoull(text, nullptr, 10));
}

// One place in so many is tried.
inline std::uint64_t stride() {
  static const std::uint64_t stride = share_in("TRY_ONE_IN");
  return stride;
}

// The first of `places` that is tried: another one in each process, the same on all of its ranks.
inline std::uint64_t first_place(std::uint64_t places) {
  static const std::uint64_t draw = std::random_device{}();
  return 1 + draw % std::clamp<std::uint64_t>(places, 1, stride());
}

// How many trials there are at least of `all`; a share rounds down in each of its plans, which
// takes less than half of it.
inline std::uint64_t at_least(std::uint64_t all) {
  return stride() > 1 ? all / (2 * stride()) : all;
}

// The trials of a grid: of each few neighbours one, drawn afresh, or all of them (tools/suites.py
// says when).
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
  std::random_device draw_;
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
