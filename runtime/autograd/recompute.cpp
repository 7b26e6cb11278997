#include "tessera/autograd/recompute.hpp"

#include <algorithm>
#include <utility>

#include "tessera/autograd/random.hpp"

namespace tessera {
namespace autograd {
namespace {
thread_local RecomputedRegions* running = nullptr;
}

// Marks one run of a recomputed function.
class RecomputeGuard {
 public:
  RecomputeGuard(RecomputedRegions& regions, bool first_run) noexcept : before_(running) {
    regions.outer_ = before_;
    regions.first_run_ = first_run;
    running = &regions;
  }
  ~RecomputeGuard() { running = before_; }
  RecomputeGuard(const RecomputeGuard&) = delete;
  RecomputeGuard& operator=(const RecomputeGuard&) = delete;

 private:
  RecomputedRegions* before_;
};

RecomputedRegions* RecomputedRegions::current() noexcept { return running; }

std::shared_ptr<Region> RecomputedRegions::take(const std::function<bool(Region&)>& is_mine) {
  if (first_run_) return outer_ ? outer_->take(is_mine) : nullptr;
  const auto found = std::find_if(regions_.begin(), regions_.end(),
                                  [&](const auto& region) { return is_mine(*region); });
  if (found == regions_.end()) return nullptr;
  std::shared_ptr<Region> region = std::move(*found);
  regions_.erase(found);
  return region;
}

}  // namespace autograd

using autograd::Gradients;
using autograd::GradModeGuard;
using autograd::RandomStateGuard;
using autograd::RecomputedRegions;
using autograd::RecomputeGuard;
using autograd::Saved;

Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x) {
  if (!autograd::grad_enabled()) return f(x);
  const autograd::RandomState random = autograd::random_state();
  const auto regions = std::make_shared<RecomputedRegions>();
  Tensor y;
  {
    const NoGradGuard no_history;
    const RecomputeGuard first_run(*regions, true);
    y = f(x.detach()).detach();  // a handle of its own, also where f hands on what it was given
  }
  return autograd::record_always(
      "recompute", {x}, y,
      [f = std::move(f), x = Saved(x), random, regions](const Tensor& g, Gradients& out) {
        Tensor input = x.get().detach();
        if (out.wants(0)) input.require_grad();
        Tensor again;
        {
          const GradModeGuard history(true);
          const RandomStateGuard same_draws(random);
          const RecomputeGuard second_run(*regions, false);
          again = f(input);
        }
        if (!again.requires_grad()) return;  // nothing in f is trainable
        again.backward(g);
        if (const Tensor dx = input.grad(); dx.defined()) out.set(0, dx);
      });
}

}  // namespace tessera
