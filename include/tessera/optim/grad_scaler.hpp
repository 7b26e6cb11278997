// Loss scaling for f16, by PyTorch's rules (torch.amp.GradScaler). Small gradients become 0 in f16.
// So the loss is multiplied by a scale, and the gradients by its inverse before the update. A step
// whose gradients overflowed is skipped, and the scale is lowered. After many good steps it is
// raised.
//
//   optim::GradScaler scaler(world.device());
//   scaler.scale(model.loss(tokens, targets)).backward();     each micro-batch alike
//   scaler.unscale(optimizer);                                only where gradients are looked at:
//   optim::clip_grad_norm(model.parameters(), 1.0);
//   scaler.step(optimizer);                                   for each optimizer
//   scaler.update();
//   optimizer.zero_grad();
//
//   update(), where an optimizer was skipped:  scale *= backoff_factor, 2^-126 at least
//   after growth_interval others in a row:     scale *= growth_factor, unless that is infinite
//
// All of this happens on the device. The host reads neither the scale nor, at once, whether a step
// was skipped: it learns this one step later, for the count of steps (Optimizer::step_if).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  // updates in a row without a skip, 1 to 2^24
};

// Each rank has one, and all ranks call it alike. An inf or NaN in one rank's shard skips the step
// on all ranks. They agree by one all-reduce of 24 bytes over the ranks that shard, and one over
// replicas. Ranks may have different scales after a reset. They then skip the step, too, and take
// the smallest scale.
//
// Ordered: on the compute stream. A reset of the model drops what the failed step had begun, and
// keeps the scale.
class GradScaler {
 public:
  // Throws: ContractError for a value out of range, and for meta.
  explicit GradScaler(const Device& device, const GradScalerOptions& options = {});

  // Returns loss times the scale: [...] -> [...]. A loss of 16 bits becomes f32.
  Tensor scale(const Tensor& loss) const;
  // Multiplies the gradients of the optimizer's parameters by 1 / scale, and notes whether they are
  // finite. Collective. Throws: ContractError if it is called twice before update() or after
  // step(), for gradients that wait unreduced, and for an optimizer on another device; as
  // Optimizer::step for parameters without memory.
  void unscale(Optimizer& optimizer);
  // Calls unscale if the program has not, and then makes the optimizer's step. The device skips the
  // step if a gradient was inf or NaN: parameters, moments and the count of steps then stay as they
  // are, on every rank. Collective. Throws: ContractError a second time before update(); as
  // Optimizer::step.
  void step(Optimizer& optimizer);
  // Changes the scale; call it once, after the steps of all optimizers. Throws: ContractError if
  // none was unscaled.
  void update();

  // The scale, f32 []. Reading it blocks the host.
  Tensor current_scale() const;
  // Whether this optimizer's step is skipped, boolean []. Call it between unscale, or step, and
  // update. Throws: ContractError at any other time.
  Tensor found_inf(const Optimizer& optimizer) const;

  // scale f32; growth_factor and backoff_factor f64; growth_interval and growth_tracker i64; all
  // are [], as PyTorch has them. Call it between steps.
  StateDict state_dict(const StateDictOptions& options = {}) const;
  // Takes such a state back. It looks at everything first, and changes nothing when it refuses.
  // Throws: ContractError that names what is missing, unexpected or out of range.
  LoadReport load(const StateDict& state, const LoadOptions& options = {});
  LoadReport load(const StateSource& source, const LoadOptions& options = {});

 private:
  struct Seen {
    const Optimizer* optimizer;
    // f64 [3], the largest over all ranks: 0, or NaN where a gradient is not finite; the scale; and
    // its negative, of which the largest is that of the smallest scale.
    Tensor agreed;
    bool has_stepped = false;
  };
  bool was_reset() const;  // the device, since what is seen
  // What this step has of an optimizer; null for nothing yet.
  Seen* find(const Optimizer& optimizer);
  LoadReport load_from(const std::function<std::shared_ptr<const StateSource>()>& source,
                       const LoadOptions& options);
  void set(double scale, double tracker);

  GradScalerOptions options_;
  Tensor state_;                  // f32 [2]: the scale, and the updates since it changed
  std::vector<Seen> seen_;        // since the last update
  std::uint64_t recoveries_ = 0;  // of the device, before these
};

}  // namespace tessera::optim
