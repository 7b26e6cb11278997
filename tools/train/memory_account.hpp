// Planned beside used: what the ranks of a run took in its steps, evaluations and save, and on how
// many of them every number was the plan's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tools/train/memory_plan.hpp"
#include "tools/train/run_report.hpp"

namespace tessera::train {

// Of one rank. Calls that report are collective, and tell the numbers of the largest rank.
class MemoryAccount {
 public:
  MemoryAccount(const MemoryPlan& plan, const World& world, RunReport& report)
      : plan_(plan), world_(world), report_(report) {}

  // What step `step` of the run, from 0, has used; `largest_peak_bytes` is that of all ranks.
  void add_step(std::int64_t step, const PhaseMemory& used, std::int64_t largest_peak_bytes);
  void add_evaluation(const PhaseMemory& used);

  // Of the `count` steps that were added, beginning with number `first`.
  void report_steps(std::int64_t first, std::int64_t count);
  // Of what these steps had on the host.
  void report_host(std::int64_t count);
  // Where there was one.
  void report_evaluation();
  void report_save(const PhaseMemory& used) { report_phase("the save", plan_.save, used); }

 private:
  void report_nccl();
  void report_phase(std::string_view phase, const PhaseMemory& planned, const PhaseMemory& used);
  std::string equal_ranks(bool is_mine_equal) const;
  std::int64_t most(std::int64_t bytes) const;  // of all ranks

  const MemoryPlan& plan_;
  const World& world_;
  RunReport& report_;
  std::int64_t peak_ = 0, host_peak_ = 0;
  // On this rank, the first step that was not as planned, live or reserved.
  struct OffPlan {
    std::int64_t step;
    PhaseMemory used;
  };
  std::optional<OffPlan> off_plan_;
  PhaseMemory evaluation_;
};

}  // namespace tessera::train
