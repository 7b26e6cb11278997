// Users who write random programs against the headers, and what they complain of.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::testing {

struct User {
  const char* name;
  std::string (*describe)(std::uint64_t seed);   // what a failure prints
  std::string (*complaint)(std::uint64_t seed);  // empty where all is well
};

// Expressions of operations, forward and backward, against double precision.
std::string describe_expression(std::uint64_t seed);
std::string expression_complaint(std::uint64_t seed);
// State of random modules and optimizers over one number of ranks, then another.
std::string describe_state(std::uint64_t seed);
std::string state_complaint(std::uint64_t seed);
// Collectives in random order on random groups; calls that do not match.
std::string describe_collectives(std::uint64_t seed);
std::string collectives_complaint(std::uint64_t seed);
// Data loaders of random sizes, worlds and workers, resumed at random steps.
std::string describe_loader(std::uint64_t seed);
std::string loader_complaint(std::uint64_t seed);

inline constexpr User kUsers[] = {{"expressions", describe_expression, expression_complaint},
                                  {"states", describe_state, state_complaint},
                                  {"collectives", describe_collectives, collectives_complaint},
                                  {"loaders", describe_loader, loader_complaint}};

}  // namespace tessera::testing
