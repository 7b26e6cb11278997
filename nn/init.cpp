// Initial values of parameters and buffers.
#include "tessera/base/philox.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

std::uint64_t key_of(Seed seed, std::string_view name) {
  return fnv1a(name, fnv1a(seed.value, 0xcbf29ce484222325ull));
}

void init(Module& module, Seed seed) {
  for (const auto& [name, parameter] : module.named_parameters()) {
    std::vector<std::uint64_t> keys;
    for (const RowPart& part : named_row_parts(name, parameter))
      keys.push_back(key_of(seed, part.name));
    parameter.initialize(keys);
  }
  for (const auto& [name, buffer] : module.named_buffers())
    buffer.initialize(key_of(seed, name), buffer.value().device());
}

void init(Module& module, Seed seed, const Device& device) {
  module.materialize(device);
  init(module, seed);
}

}  // namespace tessera::nn
