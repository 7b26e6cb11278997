// Memory for the parameters of modules without a unit, and when their gradients are complete.
#include <map>
#include <utility>

#include "runtime/param/parameter_state.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera {
namespace {

// The sinks of parameters without a unit, which completes a gradient: here the end of each backward
// pass does.
class WholeGradient final : public GradientSinks,
                            public std::enable_shared_from_this<WholeGradient> {
 public:
  explicit WholeGradient(std::shared_ptr<FlatGroup> group) : gradient_(std::move(group)) {}
  autograd::GradientSink sink(int i) override {
    if (!is_scheduled_) schedule();
    return gradient_.sink(i);
  }

 private:
  // A pass that fails drops what was left for its end, and this with it.
  struct Pass {
    std::shared_ptr<WholeGradient> of;  // its module may go before the pass ends
    ~Pass() {
      if (of->is_scheduled_) of->gradient_.abandon();
      of->is_scheduled_ = false;
    }
  };
  void schedule() {
    autograd::at_end_of_backward([pass = std::make_shared<Pass>(shared_from_this())] {
      pass->of->is_scheduled_ = false;
      pass->of->gradient_.complete();
    });
    is_scheduled_ = true;
  }

  LocalGradient gradient_;
  bool is_scheduled_ = false;
};

}  // namespace

void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device) {
  constexpr std::int64_t kEnough = std::int64_t{16} << 20;  // bytes of a group
  const auto make = [&](const std::vector<std::shared_ptr<ParameterState>>& states) {
    const auto group = FlatGroup::make(name, states, device);
    const auto sinks = std::make_shared<WholeGradient>(group);
    for (const auto& state : states) {
      state->sinks = sinks;
      state->compute_dtype = state->dtype;
      state->window = group->values.storage();
      state->window_offset_bytes = state->flat_entry().offset * state->element_bytes();
    }
  };
  for (const Parameter& p : parameters)
    TESSERA_EXPECT(p.device().is_meta(), "materialize: parameter '", p.name(),
                   "' already has memory");
  struct Pending {
    std::vector<std::shared_ptr<ParameterState>> states;
    std::int64_t bytes = 0;
  };
  std::map<DType, Pending> pending;
  for (const Parameter& p : parameters) {
    const std::shared_ptr<ParameterState>& state = state_of(p);
    Pending& of = pending[state->dtype];
    of.states.push_back(state);
    of.bytes = checked_add(of.bytes, checked_mul(p.shape().numel(), state->element_bytes()));
    if (of.bytes >= kEnough) make(std::exchange(of, {}).states);
  }
  for (const auto& [dtype, of] : pending)
    if (!of.states.empty()) make(of.states);
}

}  // namespace tessera
