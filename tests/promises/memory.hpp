// What tests of memory look at: a training whose ledger is read after every step.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/promises/support.hpp"

namespace tessera::testing {

inline constexpr int kSteps = 4;

// What a rank's ledger says of each of kSteps steps.
struct Steps {
  std::vector<std::int64_t> peaks;
  std::vector<std::vector<std::pair<std::string, std::int64_t>>> owners;  // at the peaks
  std::int64_t reserved = 0;
  bool operator==(const Steps&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const Steps& s) {
  for (std::size_t i = 0; i < s.peaks.size(); ++i) {
    out << "\n  step " << i << ": " << s.peaks[i] << " bytes:";
    for (const auto& [owner, bytes] : s.owners[i]) out << ' ' << owner << ' ' << bytes;
  }
  return out << "\n  reserved " << s.reserved << '\n';
}

inline Steps measure(const World& world, const Cell& cell) {
  Trainee trainee(world, cell, 5);
  Steps out;
  for (int k = 0; k < kSteps; ++k) {
    trainee.memory().ledger().reset_peak();
    trainee.step(k);
    world.device().block(world.device().compute().record());
    out.peaks.push_back(trainee.memory().ledger().peak_bytes());
    auto& owners = out.owners.emplace_back();
    for (const Ledger::Line& line : trainee.memory().ledger().lines())
      owners.emplace_back(line.owner, line.at_peak_bytes);
  }
  out.reserved = trainee.memory().reserved_bytes();
  return out;
}

}  // namespace tessera::testing
