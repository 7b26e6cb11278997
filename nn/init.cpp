// Initial values of parameters and buffers.
#include "tessera/base/philox.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

std::uint64_t key_of(Seed seed, std::string_view name) {
  return fnv1a(name, fnv1a(seed.value, 0xcbf29ce484222325ull));
}

void init(Module& module, Seed seed) {
  for (const auto& [name, parameter] : module.named_parameters()) {
    const ParameterState& state = *parameter.state();
    const std::int64_t begin = state.spec.owned().begin * state.spec.row_numel();
    parameter.edit([&, &name = name](const Tensor& rows) {
      state.initializer.fill(rows, state.shape, key_of(seed, name), begin);
    });
  }
  for (const auto& [name, buffer] : module.named_buffers())
    buffer.initialize(key_of(seed, name), buffer.value().device());
}

}  // namespace tessera::nn
