// The dice of random programs, and the parts that are drawn with them.
#pragma once

#include <initializer_list>
#include <random>

#include "tests/promises/random_program.hpp"

namespace tessera::testing {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  bool once_in(int n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> some) {
    return some.begin()[below(static_cast<int>(some.size()))];
  }
  template <class T>
  T& of(std::vector<T>& some) {
    return some[static_cast<std::size_t>(below(static_cast<int>(some.size())))];
  }
  // A set of ranks: most often all.
  Ranks ranks() { return once_in(3) ? static_cast<Ranks>(below(1 << kMostRanks)) : kAllRanks; }
  Reshard reshard() {
    return of({Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)});
  }

 private:
  std::mt19937_64 engine_;
};

// f(part) of `part` and all below, in the order in which they are counted.
template <class Part, class F>
void for_each_part(Part& part, const F& f) {
  f(part);
  for (auto& child : part.children) for_each_part(child, f);
}

PartPlan make_root(Dice& dice, Offload offload);

}  // namespace tessera::testing
