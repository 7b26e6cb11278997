// Runs a random program to its end, on one rank or as one of several, for who compares the two.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tests/promises/random_program.hpp"

namespace tessera::testing {

// The parameters behind the last step, by name.
using Values = std::map<std::string, std::vector<float>>;

// Of one rank that does every rank's part itself, and so has the sum of what the ranks have the
// mean of, by a power of two as much. The program ends before the step whose sums would be too long
// to be exact, be it the first: about one in 50,000 has such a step.
Values on_one_rank(Program& program);

// As a rank of `world`, which has program.ranks. Of rank 0; elsewhere none. Collective.
Values on_rank(const Program& program, World& world);

// The first bits that differ, empty for none.
std::string difference(const Values& expected, const Values& found);

}  // namespace tessera::testing
