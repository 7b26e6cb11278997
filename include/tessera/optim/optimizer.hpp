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
//
// An optimizer of your own derives from Optimizer and says two things: the scalars of a step, and
// one launch that updates one group. Lesson tests/tour/095_your_own_optimizer.cpp writes one.
#pragma once

#include <memory>
#include <vector>

#include "tessera/kernels/updates.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera::optim {

using kernels::FlatSegment;

// The arrays of one group's update, for a body to hold: 72 of its 128 bytes.
struct FlatUpdate {
  float* values;
  const float* gradient;
  float* moments[kernels::kMostMoments];
  const FlatSegment* segments;
  const float* counts;  // arrival counts, see kernels::FlatSegment
  const void* scalars;  // as put_scalars has written them
  std::int32_t segment_count;

  // On the CPU: f(segment, begin, end) over all elements to update, on the threads of `exec`.
  template <class F>
  void for_segments(Exec& exec, F f) const {
    kernels::for_segments(exec, segments, segment_count, counts, f);
  }
};

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
  // Drops the gradients of its parameters: none is there until the next backward. Where a group has
  // others too, they are kept, and zeros with an arrival count of 0 lie where these were.
  void zero_grad();

  // Another weight decay for some of its parameters, as 0 for norms and biases; a group is updated
  // in one launch all the same.  Throws: ContractError for a parameter that is not its own, for
  // what is negative or not finite, and once the state is made.
  void set_weight_decay(const std::vector<Parameter>& of, double weight_decay);

  double lr() const noexcept { return lr_; }
  void set_lr(double lr);  // throws: ContractError for what is negative or not finite

  // For keeping and restoring: steps taken so far (a reset takes back those that never began), and
  // the state of each group, in order of first mention (empty before prepare()).
  std::int64_t steps() const noexcept { return log_->steps; }
  void set_steps(std::int64_t steps);  // throws: ContractError outside [0, 2^53]
  struct GroupState {
    std::shared_ptr<FlatGroup> group;
    std::vector<Tensor> moments;  // f32 [numel] each; what they are says the optimizer
    Tensor segments;              // table of FlatSegment
    std::int32_t segment_count = 0;
  };
  const std::vector<GroupState>& states() const noexcept { return states_; }

 protected:
  // What an update keeps and is told: arrays of f32 state a group, and bytes of scalars.
  struct Needs {
    int moments = 0;
    std::size_t scalar_bytes = sizeof(kernels::UpdateScalars);
  };
  Optimizer(std::vector<Parameter> parameters, double lr, double weight_decay, const Needs& needs);

  // Writes this step's scalars, by put_scalars; `step` counts from 1.
  virtual void write_scalars(const Tensor& scalars, std::int64_t step) const = 0;
  // Updates one group, by one launch or launch_update.
  virtual void update(const GroupState& state, const Tensor& scalars) const = 0;

  // Writes a plain struct of at most 88 bytes where the device reads it. The values travel with the
  // launch, without staging.
  template <class Scalars>
  static void put_scalars(const Tensor& to, const Scalars& scalars) {
    static_assert(std::is_trivially_copyable_v<Scalars> && sizeof(Scalars) % 4 == 0 &&
                  sizeof(Scalars) <= kernels::kMostScalarBytes);
    put(to, &scalars, sizeof(Scalars));
  }
  static FlatUpdate pointers(const GroupState& state, const Tensor& scalars);
  // Submits `body`, which updates one group, to the compute stream: as reading gradient, segments
  // and scalars, and changing values and moments.
  template <class F>
  static void launch(const char* name, const GroupState& state, const Tensor& scalars,
                     const F& body) {
    submit(name, state, scalars, Body(body));
  }
  // The same of an update that the library has, with a body for every device.
  static void launch_update(kernels::UpdateOp op, const GroupState& state, const Tensor& scalars);

 private:
  static void put(const Tensor& to, const void* scalars, std::size_t bytes);
  static void submit(const char* name, const GroupState& state, const Tensor& scalars,
                     const Body& body);
  GroupState make_state(const std::shared_ptr<FlatGroup>& group) const;

  std::vector<Parameter> parameters_;
  double lr_;
  std::vector<double> weight_decays_;  // of the parameters
  Needs needs_;
  std::shared_ptr<UpdateLog> log_ = std::make_shared<UpdateLog>();
  std::vector<GroupState> states_;
  Tensor scalars_;  // needs_.scalar_bytes, on the device
};

}  // namespace tessera::optim
