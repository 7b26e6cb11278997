// One call of a unit for training, as backward meets it.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/autograd/node.hpp"

namespace tessera::shard {

class Context;
class Unit;

class UnitRegion final : public autograd::Region {
 public:
  // `trains`: false for a call without gradients that a recomputed function makes again.
  UnitRegion(const std::shared_ptr<Unit>& unit, bool trains);

  void on_backward_begin() override;
  void on_backward_end() override;

  // Null once the model is gone, and no graph that needs it is left.
  std::shared_ptr<Unit> unit() const noexcept { return unit_.lock(); }

 private:
  std::weak_ptr<Unit> unit_;
  std::uint64_t recovery_count_;  // Device::recoveries() when forward ran
  bool trains_;
  std::uint64_t version_;  // of the unit's parameters then
};

}  // namespace tessera::shard
