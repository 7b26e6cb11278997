// Elements of a tensor in row-major order, whatever its strides: those of a piece that a file gets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/tensor/tensor.hpp"

namespace tessera::checkpoint {

// Copies elements to the host from element `first` on, as many as `out` has room for; the host
// blocks. Where they do not follow each other in memory, a copy of these alone is made on the
// device first.  Throws: as Tensor::to_bytes.
void copy_row_major(std::span<std::byte> out, const Tensor& of, std::int64_t first);

}  // namespace tessera::checkpoint
