#include "kernels/kernel_table.hpp"

#include "kernels/host/cpu.hpp"

namespace tessera::kernels {
namespace {

constinit const Kernels kCpuKernels = {
#define TESSERA_KERNEL(name, Args) .name = cpu::name,
#include "kernels/kernels.def"
};

}  // namespace

const Kernels& cpu_kernels() { return kCpuKernels; }

}  // namespace tessera::kernels
