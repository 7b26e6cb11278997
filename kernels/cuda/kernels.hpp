// The kernels of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/table.cpp.
#pragma once

#include "kernels/table.hpp"

namespace tessera::kernels::cuda {

extern const Kernels kKernels;

}  // namespace tessera::kernels::cuda
