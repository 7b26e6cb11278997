// What tests of memory look at: a training whose memory is read after every step, after an
// evaluation and after a save.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/promises/support.hpp"

namespace tessera::testing {

inline constexpr int kMeasuredSteps = 4;

// What a rank's memory says of a phase: a step, the evaluation or the save.
struct Phase {
  std::int64_t live = 0, peak = 0, reserved = 0;                 // live and reserved at its end
  std::int64_t host_live = 0, host_peak = 0, host_reserved = 0;  // of what is offloaded
  std::vector<std::pair<std::string, std::int64_t>> owners{};    // at the peak of either
  bool operator==(const Phase&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const Phase& p) {
  out << "peak " << p.peak << " bytes, then live " << p.live << ", reserved " << p.reserved;
  if (p.host_peak > 0)
    out << "; of the host peak " << p.host_peak << ", then live " << p.host_live << ", reserved "
        << p.host_reserved;
  out << ':';
  for (const auto& [owner, bytes] : p.owners) out << ' ' << owner << ' ' << bytes;
  return out;
}
struct Phases {
  std::vector<Phase> steps;  // kMeasuredSteps
  Phase evaluation, save;
  bool operator==(const Phases&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const Phases& p) {
  for (const Phase& step : p.steps) out << "\n  step: " << step;
  return out << "\n  evaluation: " << p.evaluation << "\n  save: " << p.save << '\n';
}

inline Phases measure(const World& world, const Cell& cell) {
  Trainee trainee(world, cell, 5);
  Ledger& ledger = trainee.memory().ledger();
  const bool is_offloaded = cell.offload == Offload::cpu;
  const auto phase = [&](const auto& work) {
    ledger.reset_peak();
    if (is_offloaded) trainee.shard_memory().ledger().reset_peak();
    work();
    world.device().block(world.device().compute().record());
    Phase out{ledger.live_bytes(), ledger.peak_bytes(), trainee.memory().reserved_bytes()};
    for (const Ledger::Line& line : ledger.lines())
      out.owners.emplace_back(line.owner, line.at_peak_bytes);
    if (!is_offloaded) return out;
    Memory& host = trainee.shard_memory();
    out.host_live = host.ledger().live_bytes();
    out.host_peak = host.ledger().peak_bytes();
    out.host_reserved = host.reserved_bytes();
    for (const Ledger::Line& line : host.ledger().lines())
      out.owners.emplace_back("host: " + line.owner, line.at_peak_bytes);
    return out;
  };
  Phases out;
  for (int k = 0; k < kMeasuredSteps; ++k) out.steps.push_back(phase([&] { trainee.step(k); }));
  out.evaluation = phase([&] { trainee.evaluate(kMeasuredSteps); });
  out.save = phase([&] { trainee.save(); });
  return out;
}

}  // namespace tessera::testing
