#include "tessera/autograd/recompute.hpp"

#include "tessera/autograd/random.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::GradModeGuard;
using autograd::RandomStateGuard;
using autograd::Saved;

Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x) {
  if (!autograd::grad_enabled()) return f(x);
  const autograd::RandomState random = autograd::random_state();
  Tensor y;
  {
    const NoGradGuard no_history;
    y = f(x.detach()).detach();  // a handle of its own, also where f hands on what it was given
  }
  return autograd::record_always(
      "recompute", {x}, y,
      [f = std::move(f), x = Saved(x), random](const Tensor& g, Gradients& out) {
        Tensor input = x.get().detach();
        if (out.wants(0)) input.require_grad();
        Tensor again;
        {
          const GradModeGuard history(true);
          const RandomStateGuard same_draws(random);
          again = f(input);
        }
        if (!again.requires_grad()) return;  // nothing in f is trainable
        again.backward(g);
        if (const Tensor dx = input.grad(); dx.defined()) out.set(0, dx);
      });
}

}  // namespace tessera
