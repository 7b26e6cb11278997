// What a program decides about a unit while it runs; see shard/runtime_control.hpp. It keeps the
// decisions, which UnitShards and Slots need, too; what follows from them the unit does.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class Unit;

class UnitControl {
 public:
  // `shards` outlives this. `is_read`: whether backward reads any of the parameters.
  UnitControl(UnitShards& shards, bool is_read)
      : shards_(shards),
        reshard_(shards.options.reshard_after_forward),
        may_be_read_(is_read),
        is_read_(is_read) {}

  // --- how long it stays open ---
  void set_reshard_after_forward(Reshard when) {
    if (std::exchange(shards_.options.reshard_after_forward, when) == when) return;
    name_decisions();
    if (shards_.slots) shards_.slots->set_keeps_open(shards_.number, keeps_open());
  }
  bool keeps_open() const noexcept {
    return shards_.options.reshard_after_forward == Reshard::never ||
           (may_stay() && shards_.is_root());
  }
  // Through the turn from forward to backward, if it is next there.
  bool may_stay() const noexcept {
    return shards_.options.reshard_after_forward == Reshard::automatic;
  }
  void set_reshard_after_backward(bool reshards) {
    reshards_after_backward_ = reshards;
    name_decisions();
  }
  bool reshards_after_backward() const noexcept { return reshards_after_backward_; }
  void set_unshard_in_backward(bool unshards) {
    is_read_ = unshards;
    name_decisions();
  }
  bool is_read_in_backward() const noexcept { return is_read_; }

  // --- which gathers run ahead ---
  // The gathers of the listed units are queued behind its own: in its call, or in backward.
  enum class Prefetch : std::uint8_t { forward, backward };
  using PrefetchList = std::vector<std::weak_ptr<Unit>>;
  void set_prefetch(Prefetch where, PrefetchList units) {
    prefetch_[static_cast<std::size_t>(where)] = std::move(units);
    name_decisions();
  }
  const PrefetchList& prefetch_list(Prefetch where) const noexcept {
    return prefetch_[static_cast<std::size_t>(where)];
  }
  // Tells the context what it has to expect.
  // Throws: ContractError where a unit of another root is listed.
  void check(Context& context) const;

  // --- what its reductions do ---
  void set_reduces(bool reduces) {
    shards_.reduces = shards_.all_reduces = reduces;
    name_decisions();
  }
  void set_all_reduces(bool all_reduces) {
    shards_.all_reduces = all_reduces;
    name_decisions();
  }
  void set_divide_factor(double factor) {
    shards_.divide_factor = factor;
    name_decisions();
  }
  void set_reductions_in_flight(int reductions) {
    shards_.options.reductions_in_flight = reductions;
    if (shards_.slots) shards_.slots->set_reductions_in_flight(shards_.number, reductions);
  }
  // Ranks that differ are told so by the name of the reduction.
  void set_all_reduce_hook(AllReduceHook hook, std::optional<StreamId> stream) {
    shards_.hook = std::move(hook);
    shards_.hook_stream = stream;
    shards_.set_name(shards_.name);
  }

  // What changes gathers, their order or what is reduced stands behind the name of the unit's own
  // gather: ranks that have decided otherwise hear so, and not of what differs then.
  void name_decisions();

  // It lies inside the module of another unit.
  void set_inner() noexcept { is_inner_ = true; }
  bool is_inner() const noexcept { return is_inner_; }

 private:
  UnitShards& shards_;
  const Reshard reshard_;   // what fully_shard was given,
  const bool may_be_read_;  // and found
  bool is_read_, is_inner_ = false, reshards_after_backward_ = true;
  PrefetchList prefetch_[2];
};

}  // namespace tessera::shard
