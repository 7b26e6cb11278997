// The kernels of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/table.cpp.
#pragma once

#include "kernels/table.hpp"

namespace tessera::kernels::cuda {

extern const Kernels kKernels;

void gemm(const GemmArgs&, Exec&);  // in cuda/blas.cpp and in emulator/gemm.cpp
void gemm_gelu(const GemmGeluArgs&, Exec&);
bool gemm_choice(const GemmArgs&, int choice, Exec&);

}  // namespace tessera::kernels::cuda
