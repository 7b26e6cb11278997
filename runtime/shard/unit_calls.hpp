// Where a unit is: in calls of its own, in a round of them, in backward's part of them. It counts;
// what follows from that the unit and BackwardOrder do.
//
//   forward   begin ── begin ── end ── end         a module may call itself: the outermost call
//             (gather)                 (close)     gathers and closes
//   backward  enter ── enter ── leave ── leave     calls inside of it, in mirrored order
//             (gather)                   (reduce, close)
//
// Calls of a list, from the first until all modules have run or the outermost call ends, are one
// round: it stays open through them, and backward reduces once, where it leaves the first. Of one
// module each call is a round.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/shard/unit_region.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::shard {

class UnitCalls {
 public:
  // `modules`: of a list.
  explicit UnitCalls(std::vector<const nn::Module*> modules = {}) : modules_(std::move(modules)) {
    left_.reserve(modules_.size());
  }

  // --- in forward ---
  bool is_running() const noexcept { return running_ > 0; }
  void begin_call() noexcept { ++running_; }
  // Whether it was the outermost.
  bool end_call() noexcept {
    if (--running_ > 0) return false;
    guard_.reset();
    return true;
  }
  // What the outermost call makes until it ends is the region that backward meets again. `begins`:
  // the number at which it begins, see autograd::RegionGuard.
  void record_call(const std::shared_ptr<Unit>& unit, BackwardNeeds needs, std::uint64_t begins) {
    needs.ends_round = !round_.is_recorded;
    region_ = std::make_shared<UnitRegion>(unit, needs);
    guard_.emplace(region_, unit, begins);
    round_ = {.is_recorded = true, .is_read = round_.is_read || needs.parameters};
  }

  // A recomputed function inside of the outermost call makes one again.
  void record_call_again() noexcept {
    if (!guard_) return;
    region_->need_parameters();
    round_.is_read = true;
  }

  // --- rounds ---
  bool is_list() const noexcept { return !modules_.empty(); }
  // Whether it is the unit of these.
  bool is_of(const std::vector<nn::Module*>& modules) const {
    return modules.size() == std::max<std::size_t>(modules_.size(), 1) &&
           (!is_list() || std::is_permutation(modules.begin(), modules.end(), modules_.begin()));
  }
  bool is_in_round() const noexcept { return !left_.empty(); }
  void begin_round() { left_ = modules_; }
  void note_run(const nn::Module& module) { std::erase(left_, &module); }
  // Whether backward may come to a call of it, and to one whose parameters it reads.
  struct Round {
    bool is_recorded = false, is_read = false;
  };
  Round end_round() noexcept {
    left_.clear();
    return std::exchange(round_, {});
  }

  // --- in backward ---
  // How many of its calls are entered.
  int entered() const noexcept { return entered_; }
  void enter(std::uint64_t version) noexcept {
    ++entered_;
    version_ = version;
  }
  // Whether backward is through with it: no call of it is entered, or comes in the same round.
  bool leave(bool ends_round) noexcept {
    awaits_round_ = !ends_round;
    return --entered_ == 0 && ends_round;
  }
  // Calls of a round that has been entered are still to come.
  bool awaits_round() const noexcept { return awaits_round_; }
  // Of the parameters, in the forward of the call entered last; a recomputed call must find it.
  std::uint64_t version() const noexcept { return version_; }
  void abandon_backward() noexcept {
    entered_ = 0;
    awaits_round_ = false;
  }

 private:
  std::vector<const nn::Module*> modules_, left_;  // these have still to run in the round
  Round round_;
  int running_ = 0;
  std::shared_ptr<UnitRegion> region_;  // of the call that runs or ran last
  std::optional<autograd::RegionGuard> guard_;
  int entered_ = 0;
  bool awaits_round_ = false;
  std::uint64_t version_ = 0;
};

}  // namespace tessera::shard
