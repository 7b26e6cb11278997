#include "tessera/autograd/random.hpp"

#include <cstring>

#include "runtime/autograd/step_draws.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::autograd {
namespace {

thread_local const RandomState* g_step_begin = nullptr;

std::uint64_t dropout_key(std::uint64_t seed, std::uint64_t draw) {
  return fnv1a(draw, fnv1a(seed, fnv1a("dropout")));
}

}  // namespace

RandomState& random_state() noexcept {
  thread_local RandomState state;
  return state;
}

StepDraws::StepDraws(const RandomState& begin) noexcept { g_step_begin = &begin; }
StepDraws::~StepDraws() { g_step_begin = nullptr; }

// A replay finds the random state as the step would: its keys are counted from there.
DropoutKey next_dropout_key(const Device& device) {
  RandomState& state = random_state();
  DropoutKey key(dropout_key(state.seed, state.draws));
  StepMemory* const step = g_step_begin ? StepMemory::of(device) : nullptr;
  if (step) {
    TESSERA_EXPECT(state.seed == g_step_begin->seed && state.draws >= g_step_begin->draws,
                   "captured step: the step sets its own seed, so every replay would draw the "
                   "same; set autograd::random_state().seed before the step");
    const std::uint64_t draw = state.draws - g_step_begin->draws;
    const StepMemory::Value value = step->value_of(draw, sizeof key.number);
    std::memcpy(value.host, &key.number, sizeof key.number);
    step->before_replay([to = value.host, draw] {
      const RandomState& now = random_state();
      const std::uint64_t number = dropout_key(now.seed, now.draws + draw);
      std::memcpy(to, &number, sizeof number);
    });
    key.on_device = reinterpret_cast<const std::uint64_t*>(value.device);
  }
  ++state.draws;
  return key;
}

std::int64_t dropout_offset(const Tensor& x) {
  constexpr std::int64_t kPerCounter = 4;
  const std::optional<std::int64_t> first_row = random_state().first_row;
  if (!first_row) return checked_mul(x.device().rank(), ceil_div(x.numel(), kPerCounter));
  const std::int64_t row = x.ndim() > 0 && x.size(0) > 0 ? x.numel() / x.size(0) : 0;
  return checked_mul(*first_row, row) / kPerCounter;
}

}  // namespace tessera::autograd
