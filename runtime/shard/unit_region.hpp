// One call of a unit for training, as backward meets it.
#pragma once

#include <cstdint>
#include <memory>
#include <typeinfo>

#include "tessera/autograd/node.hpp"

namespace tessera::shard {

class Unit;

// What backward needs of a unit for one of its calls.
struct BackwardNeeds {
  bool gradients = true;   // false for a call without them that a recomputed function makes again
  bool parameters = true;  // false where nothing reads them
  bool ends_round = true;  // false where backward comes to calls of the same round later
  std::uint64_t version = 0;  // of its parameters in forward
};

class UnitRegion final : public autograd::Region {
 public:
  UnitRegion(const std::shared_ptr<Unit>& unit, const BackwardNeeds& needs);

  // Null where the region is no call of a unit.
  static UnitRegion* of(autograd::Region& region) {
    return typeid(region) == typeid(UnitRegion) ? static_cast<UnitRegion*>(&region) : nullptr;
  }

  void on_backward_begin() override;
  void on_backward_end() override;
  void on_backward_inside() override;

  // Null once the model is gone, and no graph that needs it is left.
  std::shared_ptr<Unit> unit() const noexcept { return unit_.lock(); }
  const BackwardNeeds& needs() const noexcept { return needs_; }
  void need_parameters() noexcept { needs_.parameters = true; }

 private:
  std::weak_ptr<Unit> unit_;
  std::uint64_t recovery_count_;  // Device::recoveries() when forward ran
  BackwardNeeds needs_;
};

}  // namespace tessera::shard
