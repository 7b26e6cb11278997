#include "tools/train/memory_account.hpp"

#include <algorithm>

#include "runtime/comm/planned_nccl.hpp"
#include "tessera/base/error.hpp"
#include "tools/train/dry_run.hpp"

namespace tessera::train {
namespace {

// Byte counts travel as doubles, which hold them exactly.
std::int64_t bytes_of(double count) { return static_cast<std::int64_t>(count); }

}  // namespace

void MemoryAccount::add_step(std::int64_t step, const PhaseMemory& used,
                             std::int64_t largest_peak_bytes) {
  if (!off_plan_ && used != plan_.of_step(step)) off_plan_ = {step, used};
  peak_ = std::max(peak_, largest_peak_bytes);
  host_peak_ = std::max(host_peak_, used.host_peak_bytes);
}

void MemoryAccount::add_evaluation(const PhaseMemory& used) {
  evaluation_ = {std::max(evaluation_.peak_bytes, used.peak_bytes), used.reserved_bytes,
                 std::max(evaluation_.host_peak_bytes, used.host_peak_bytes),
                 used.host_reserved_bytes};
}

void MemoryAccount::report_steps(std::int64_t first, std::int64_t count) {
  const std::string equal = equal_ranks(!off_plan_);
  const std::int64_t planned = most(plan_.of_steps(count).peak_bytes);
  report_.line(concat("memory a rank: planned peak ", planned, " bytes, used ", peak_, " bytes (",
                      mebibytes(peak_), ")", planned == peak_ ? ", as planned; " : "; ", equal));
  if (world_.kind() == WorldKind::nccl) report_nccl();
  const std::int64_t off = -most(off_plan_ ? -off_plan_->step : -count);
  if (off >= count) return;
  const PhaseMemory here = plan_.of_step(off);
  report_phase(concat("step ", first + off + 1, ", the first that was not as planned"), here,
               off_plan_ && off_plan_->step == off ? off_plan_->used : here);
}

void MemoryAccount::report_host(std::int64_t count) {
  const std::int64_t planned = most(plan_.of_steps(count).host_peak_bytes), used = most(host_peak_);
  report_.line(concat("on the host: planned peak ", planned, " bytes, used ", used, " bytes (",
                      mebibytes(used), ")"));
}

void MemoryAccount::report_evaluation() {
  if (evaluation_.peak_bytes > 0) report_phase("evaluation", plan_.evaluation, evaluation_);
}

// On top of what is planned.
void MemoryAccount::report_nccl() {
  const std::int64_t measured =
      most(Memory::of(world_.device()).ledger().outside_bytes(comm::kMeasuredNccl));
  report_.line(concat("memory of NCCL's communicators, on top: measured ", measured,
                      " bytes a rank (", mebibytes(measured), "), assumed ", plan_.nccl_bytes,
                      " bytes (", mebibytes(plan_.nccl_bytes), ")"));
}

// On how many ranks each number is that of the rank's own plan is said, too.
void MemoryAccount::report_phase(std::string_view phase, const PhaseMemory& planned,
                                 const PhaseMemory& used) {
  double largest[] = {static_cast<double>(planned.peak_bytes), static_cast<double>(used.peak_bytes),
                      static_cast<double>(planned.reserved_bytes),
                      static_cast<double>(used.reserved_bytes)};
  world_.max(largest);
  const std::string equal = equal_ranks(planned == used);
  report_.line(concat("memory a rank in ", phase, ": planned peak ", bytes_of(largest[0]),
                      " bytes, used ", bytes_of(largest[1]), " bytes; planned reserve ",
                      bytes_of(largest[2]), " bytes, used ", bytes_of(largest[3]), " bytes; ",
                      equal));
}

std::string MemoryAccount::equal_ranks(bool is_mine_equal) const {
  return concat(static_cast<std::int64_t>(world_.sum(is_mine_equal)), " of ", world_.size(),
                " ranks as in their plans");
}

std::int64_t MemoryAccount::most(std::int64_t bytes) const {
  return bytes_of(world_.max(static_cast<double>(bytes)));
}

}  // namespace tessera::train
