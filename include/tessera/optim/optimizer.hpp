// What all optimizers share: state over flat groups, one fused launch per group and step, no host
// sync.
//
//   optim::AdamW optimizer(model.parameters(), {.lr = 3e-4});   before or after sharding
//   optimizer.prepare();                                        state exists before the first step
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A group whose gradient is undefined is skipped, and so is, on the device, a parameter whose
// arrival count is 0: no rank had a gradient. Frozen parameters are left alone. Works on the f32
// shards of this rank only.
#pragma once

#include <memory>
#include <vector>

#include "tessera/param/parameter.hpp"

namespace tessera::optim {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Makes the state: zero moments, tables, scalars. Done by the first step if not before.
  // Throws: ContractError for a parameter without memory, and for groups on several devices.
  void prepare();
  // One update from the gradients as they are. Every call counts as one step for all parameters.
  void step();
  // Drops the gradients of all groups of these parameters: none is there until the next backward.
  void zero_grad();

  double lr() const noexcept { return lr_; }
  void set_lr(double lr) noexcept { lr_ = lr; }

  // For keeping and restoring: steps taken so far (a reset takes back those that never began), and
  // the state of each group, in order of first mention (empty before prepare()).
  std::int64_t steps() const noexcept { return log_->steps; }
  void set_steps(std::int64_t steps) noexcept { log_->steps = steps; }
  struct GroupState {
    std::shared_ptr<FlatGroup> group;
    std::vector<Tensor> moments;  // f32 [numel] each; what they are says the optimizer
    Tensor segments;              // table of kernels::OptimSegment
    std::int32_t segment_count = 0;
  };
  const std::vector<GroupState>& states() const noexcept { return states_; }

 protected:
  // `moments`: arrays of state per group.
  Optimizer(std::vector<Parameter> parameters, double lr, double weight_decay, int moments);

  // Writes this step's scalars; `step` counts from 1.
  virtual void write_scalars(const Tensor& scalars, std::int64_t step) const = 0;
  virtual void update(const GroupState& state, const Tensor& scalars) const = 0;

 private:
  GroupState make_state(const std::shared_ptr<FlatGroup>& group) const;

  std::vector<Parameter> parameters_;
  double lr_, weight_decay_;
  int moments_;
  std::shared_ptr<UpdateLog> log_ = std::make_shared<UpdateLog>();
  std::vector<GroupState> states_;
  Tensor scalars_;  // kernels::OptimScalars, on the device
};

}  // namespace tessera::optim
