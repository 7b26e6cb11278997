// Initial values of parameters and buffers.
#include <algorithm>
#include <set>

#include "tessera/base/philox.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/nn/state.hpp"

namespace tessera::nn {

std::uint64_t key_of(Seed seed, std::string_view name) {
  return fnv1a(name, fnv1a(seed.value, 0xcbf29ce484222325ull));
}

namespace {

// Of what is stored in 8 bits: the names of the scales.
std::set<std::string> names_of_scales(const Module& module) {
  std::set<std::string> names;
  for (const StateTarget& target : state_targets(module))
    if (target.are_row_scales) names.insert(target.names[0]);
  return names;
}

}  // namespace

void init(Module& module, Seed seed) {
  const NamedParameters named = module.named_parameters();
  const std::set<std::string> scales = names_of_scales(module);
  for (const auto& [name, parameter] : named) {
    if (scales.contains(name)) continue;  // made with what they belong to
    std::vector<std::uint64_t> keys;
    for (const RowPart& part : named_row_parts(name, parameter))
      keys.push_back(key_of(seed, part.name));
    if (const std::string of_rows = concat(name, kRowScales); scales.contains(of_rows))
      parameter.initialize(
          keys, std::ranges::find(named, of_rows, &NamedParameters::value_type::first)->second);
    else
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
