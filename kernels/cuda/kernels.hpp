// The kernels of the driver modules by name: each defined in kernels/<op>.cu, collected in
// kernels/cuda/table.cpp.
#pragma once

#include "kernels/table.hpp"

namespace tessera::kernels::cuda {

void unary(const UnaryArgs&, Exec&);
void unary_copy(const UnaryArgs&, Exec&);  // copy, logical_not and isfinite
void binary(const BinaryArgs&, Exec&);
void scalar(const ScalarArgs&, Exec&);
void where(const WhereArgs&, Exec&);
void fill(const FillArgs&, Exec&);
void arange(const ArangeArgs&, Exec&);
void axpby(const AxpbyArgs&, Exec&);
void swiglu(const SwigluArgs&, Exec&);
void swiglu_backward(const SwigluBackwardArgs&, Exec&);

void dropout(const DropoutArgs&, Exec&);

void adamw(const AdamWArgs&, Exec&);
void sgd(const SgdArgs&, Exec&);
void clip(const ClipArgs&, Exec&);
void scale_flat(const ScaleFlatArgs&, Exec&);
void put_scalars(const PutScalarsArgs&, Exec&);

void pack(const PackArgs&, Exec&);
void complete(const CompleteArgs&, Exec&);
void normal(const NormalArgs&, Exec&);
void uniform(const UniformArgs&, Exec&);
void reduce_peers(const PeersArgs&, Exec&);
void copy(const CopyArgs&, Exec&);
void copies(const CopiesArgs&, Exec&);

extern const Kernels kKernels;

void attention(const AttentionArgs&, Exec&);
void attention_backward(const AttentionBackwardArgs&, Exec&);
void embedding(const EmbeddingArgs&, Exec&);
void embedding_backward(const EmbeddingBackwardArgs&, Exec&);
void gather(const IndexArgs&, Exec&);
void index_add(const IndexArgs&, Exec&);
void index_select(const IndexArgs&, Exec&);
void rope(const RopeArgs&, Exec&);
void rope_table(const RopeTableArgs&, Exec&);
void scatter_add(const IndexArgs&, Exec&);

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
