// The kernels of a driver module.
#include "kernels/kernel_table.hpp"

#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

constinit const Kernels kKernels = {
#define TESSERA_KERNEL(name, Args) .name = name,
#include "kernels/kernels.def"
    .gemm_choice = gemm_choice,
};

}  // namespace tessera::kernels::cuda
