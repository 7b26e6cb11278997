// The kernels of a driver module, for the hardware and for the emulator.
#include "kernels/table.hpp"

#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {
namespace {

// In the place of a kernel that is not there.
template <class Args>
void missing(const Args&, Exec& exec) {
  exec.error = "this operation has no CUDA kernel";
}

}  // namespace

constinit const Kernels kKernels = {
    .elementwise = {.unary = missing<UnaryArgs>,
                    .binary = missing<BinaryArgs>,
                    .scalar = missing<ScalarArgs>,
                    .where = missing<WhereArgs>,
                    .fill = missing<FillArgs>,
                    .arange = missing<ArangeArgs>,
                    .axpby = missing<AxpbyArgs>,
                    .swiglu = missing<SwigluArgs>,
                    .swiglu_backward = missing<SwigluBackwardArgs>},
    .reduce = {.reduce = reduce, .sumsq_flat = sumsq_flat},
    .gemm = {.gemm = gemm, .gemm_gelu = gemm_gelu, .gemm_choice = gemm_choice},
    .softmax = {.softmax = softmax, .softmax_backward = softmax_backward},
    .cross_entropy = {.cross_entropy = cross_entropy,
                      .cross_entropy_backward = cross_entropy_backward},
    .attention = {.attention = missing<AttentionArgs>,
                  .attention_backward = missing<AttentionBackwardArgs>},
    .rope = {.rope = missing<RopeArgs>, .rope_table = missing<RopeTableArgs>},
    .norm = {.rms_norm = rms_norm, .layer_norm = layer_norm, .norm_backward = norm_backward},
    .embedding = {.embedding = missing<EmbeddingArgs>,
                  .embedding_backward = missing<EmbeddingBackwardArgs>},
    .index = {.index_select = missing<IndexArgs>,
              .index_add = missing<IndexArgs>,
              .gather = missing<IndexArgs>,
              .scatter_add = missing<IndexArgs>},
    .dropout = {.dropout = missing<DropoutArgs>},
    .optimizer = {.adamw = missing<AdamWArgs>,
                  .sgd = missing<SgdArgs>,
                  .clip = missing<ClipArgs>,
                  .scale_flat = missing<ScaleFlatArgs>,
                  .put_scalars = missing<PutScalarsArgs>},
    .random = {.normal = missing<NormalArgs>, .uniform = missing<UniformArgs>},
    .flat = {.pack = missing<PackArgs>, .complete = missing<CompleteArgs>},
    .peers = {.reduce = missing<PeersArgs>, .copy = missing<CopyArgs>},
};

}  // namespace tessera::kernels::cuda
