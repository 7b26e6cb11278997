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
    .elementwise = {.unary = unary,
                    .binary = binary,
                    .scalar = scalar,
                    .where = where,
                    .fill = fill,
                    .arange = arange,
                    .axpby = axpby,
                    .swiglu = swiglu,
                    .swiglu_backward = swiglu_backward},
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
    .dropout = {.dropout = dropout},
    .optimizer = {.adamw = adamw,
                  .sgd = sgd,
                  .clip = clip,
                  .scale_flat = scale_flat,
                  .put_scalars = put_scalars},
    .random = {.normal = normal, .uniform = uniform},
    .flat = {.pack = pack, .complete = complete},
    .peers = {.reduce = reduce_peers, .copy = copy},
};

}  // namespace tessera::kernels::cuda
