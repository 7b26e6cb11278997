// Contiguous conversion between dtypes and raw strided copies: the staging through which strided
// operands and 16-bit floats reach kernels that are written for contiguous f32, f64 or integers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera::kernels::host {

// Converts n contiguous elements. `out` may be `in` when the element sizes are equal.
using Converter = void (*)(void* out, const void* in, std::int64_t n);
Converter converter(DType to, DType from);

// Typed forms of the same for the floats. Equal types copy.
void convert(float* out, const float* in, std::int64_t n);
void convert(float* out, const BFloat16* in, std::int64_t n);
void convert(float* out, const Float16* in, std::int64_t n);
void convert(BFloat16* out, const float* in, std::int64_t n);
void convert(Float16* out, const float* in, std::int64_t n);
void convert(double* out, const double* in, std::int64_t n);

// n elements of `size` bytes (1, 2, 4, 8) between a strided array and a contiguous one; strides
// count elements.
void gather_strided(void* out, const void* in, std::int64_t stride, std::int64_t n,
                    std::size_t size);
void scatter_strided(void* out, std::int64_t stride, const void* in, std::int64_t n,
                     std::size_t size);

}  // namespace tessera::kernels::host
