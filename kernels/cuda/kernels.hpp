// The bodies of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/table.cpp. Products are defined in cuda/blas.cpp and in emulator/gemm.cpp.
#pragma once

#include "kernels/table.hpp"

namespace tessera::kernels::cuda {

#define TESSERA_KERNEL(name, Args) void name(const Args&, Exec&);
#include "kernels/kernels.def"

bool gemm_choice(const GemmArgs&, int choice, Exec&);
void unary_copy(const UnaryArgs&, Exec&);  // the part of `unary` in elementwise_copy.cu

extern const Kernels kKernels;

}  // namespace tessera::kernels::cuda
