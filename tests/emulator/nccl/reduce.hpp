// Sums and maxima as NCCL's rings make them: rounded to the type at every hop.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <span>

namespace tessera::nccl_double {

std::size_t size_of(ncclDataType_t dtype);
const char* name_of(ncclDataType_t dtype);
const char* name_of(ncclRedOp_t op);
// Whether there are sums of this type. 8-bit floats only travel.
bool is_reduced(ncclDataType_t dtype);

// out[i] = from[0][i] + from[1][i], rounded, + from[2][i], rounded, and so on. A maximum of floats
// is fmax's, which loses a NaN that meets a number.
void reduce(void* out, std::span<const std::byte* const> from, std::size_t count,
            ncclDataType_t dtype, ncclRedOp_t op);

}  // namespace tessera::nccl_double
