// A tensor's values on the host, of any dtype, as doubles.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::testing {

// Row-major; the host blocks. Whole numbers above 2^53 are rounded.
inline std::vector<double> to_doubles(const Tensor& x) {
  return visit(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<std::byte> bytes(static_cast<std::size_t>(x.numel()) * sizeof(T));
    x.to_bytes(bytes);
    std::vector<double> out;
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
      T element;
      std::memcpy(&element, bytes.data() + at, sizeof(T));
      out.push_back(static_cast<double>(element));
    }
    return out;
  });
}

}  // namespace tessera::testing
