// The kernels of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/table.cpp.
#pragma once

#include "kernels/table.hpp"

namespace tessera::kernels::cuda {

extern const Kernels kKernels;

void gemm(const GemmArgs&, Exec&);  // in cuda/blas.cpp and in emulator/gemm.cpp
void gemm_gelu(const GemmGeluArgs&, Exec&);
bool gemm_choice(const GemmArgs&, int choice, Exec&);

void rms_norm(const RmsNormArgs&, Exec&);
void layer_norm(const LayerNormArgs&, Exec&);
void norm_backward(const NormBackwardArgs&, Exec&);
void softmax(const SoftmaxArgs&, Exec&);
void softmax_backward(const SoftmaxBackwardArgs&, Exec&);
void cross_entropy(const CrossEntropyArgs&, Exec&);
void cross_entropy_backward(const CrossEntropyBackwardArgs&, Exec&);
void reduce(const ReduceArgs&, Exec&);
void sumsq_flat(const SumsqFlatArgs&, Exec&);

}  // namespace tessera::kernels::cuda
