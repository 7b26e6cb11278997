// The lines that bench-collectives prints, to the columns of nccl-tests. What is no row begins with
// #, as there.
#pragma once

#include <optional>
#include <string>

#include "bench/collectives/calls.hpp"

namespace tessera::collectives {

// Of one row, out of place or in place. An operation's time; 10^9 bytes a second.
struct Figures {
  double seconds = 0, algbw = 0, busbw = 0;
  std::optional<std::int64_t> wrong{};  // nothing was checked
};

// std::snprintf into a string of its own, of at most 400 bytes.
[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

std::string head(const World& world, const Options& options);
std::string columns();
// The columns before the figures, and one side's; without figures N/A.
std::string begin(const Row& row);
std::string side(const std::optional<Figures>& figures);
std::string totals(std::int64_t wrong, double mean_busbw);

}  // namespace tessera::collectives
