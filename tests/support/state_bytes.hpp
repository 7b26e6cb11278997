// The bytes of a state dict's tensors, by name: of each as a contiguous one has them.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tessera/param/state_dict.hpp"

namespace tessera::testing {

using Bytes = std::map<std::string, std::vector<std::byte>>;

inline Bytes bytes_of(const StateDict& state) {
  Bytes all;
  for (const auto& [name, entry] : state) {
    auto& own = all[name];
    own.resize(static_cast<std::size_t>(entry.values.numel()) * size_bytes(entry.values.dtype()));
    entry.values.to_bytes(own);
  }
  return all;
}

}  // namespace tessera::testing
