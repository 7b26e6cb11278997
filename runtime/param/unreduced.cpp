// Gradients that backward has kept without reducing them: which of a flat group's, and who may not
// go on without them.
#include <algorithm>

#include "runtime/param/parameter_state.hpp"

namespace tessera {

void FlatGroup::set_unreduced(std::size_t first, std::size_t end, bool is_unreduced) {
  if (unreduced.empty() && !is_unreduced) return;
  unreduced.resize(trainable.size());
  for (std::size_t i = first; i < end; ++i) unreduced[i] = is_unreduced;
  if (std::ranges::find(unreduced, true) == unreduced.end()) unreduced.clear();
}

void FlatGroup::expect_reduced(const char* function, std::size_t first, std::size_t end) const {
  for (std::size_t i = first; i < std::min(end, unreduced.size()); ++i) {
    if (!unreduced[i]) continue;
    const std::shared_ptr<ParameterState> p = trained(i).parameter.lock();
    throw ContractError(
        concat(function, ": unit '", name, "' has a gradient of parameter '", p ? p->name : "",
               "' that backward was told not to reduce yet; go backward once more after "
               "set_requires_gradient_sync(model, true), or drop it by zero_grad"));
  }
}

}  // namespace tessera
