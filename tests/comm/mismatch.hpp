// The ways in which one rank can go astray, for worlds of any kind: each is provoked on one rank,
// and every rank tells what it heard and whether any of its outputs was touched.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"

namespace mismatch {

struct Kind {
  const char* name;
  // What each rank submits; `odd` on the one that goes astray.
  void (*submit)(tessera::World& world, std::byte* arena, bool odd);
  // What every message must say besides the two ranks; empty: anything.
  std::vector<const char*> says;
  // The submission itself is refused, on the odd rank alone.
  bool refused = false;
};

// Operation, order, count, dtype, reduce operation, root, target, chunk, group, extra, missing,
// double, stream, alias; and order across communicators.
const std::vector<Kind>& kinds();

struct Heard {
  std::string type;  // of the exception: "CommError", "ContractError", "" for none
  std::string message;
  bool untouched = true;  // all memory but that of the calls before is as it was
};

// Runs `kind` on a fresh world with `odd` as the rank that goes astray, after calls that agree.
// Rethrows nothing: the world ends as failed by `fail`.
Heard provoke(tessera::World& world, const Kind& kind, int odd);

// Empty, or what is wrong with what a rank heard.
std::string verdict(const Heard& heard, const Kind& kind, int rank, int odd);

}  // namespace mismatch
