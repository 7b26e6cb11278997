// The bodies of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/module_table.cpp. What libraries compute is defined in cuda/blas.cpp and
// cuda/cudnn.cpp.
#pragma once

#include "kernels/kernel_table.hpp"

namespace tessera::kernels::cuda {

#define TESSERA_KERNEL(name, Args) void name(const Args&, Exec&);
#include "kernels/kernels.def"

bool gemm_choice(const GemmArgs&, int choice, Exec&);
// Our own attention: the reference of a library's, and what runs where there is none.
void attention_in_tiles(const AttentionArgs&, Exec&);
void attention_backward_in_tiles(const AttentionBackwardArgs&, Exec&);
// Attention's backward pass for what suits; false where it doesn't, and nothing is queued.
bool attention_backward_on_tensor_cores(const AttentionBackwardArgs&, Exec&);
void unary_copy(const UnaryArgs&, Exec&);  // the part of `unary` in elementwise_copy.cu

extern const Kernels kKernels;

}  // namespace tessera::kernels::cuda
