// The kernels of a driver module, for the hardware and for the emulator.
#include "kernels/table.hpp"

#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

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
    .attention = {.attention = attention, .attention_backward = attention_backward},
    .rope = {.rope = rope, .rope_table = rope_table},
    .norm = {.rms_norm = rms_norm, .layer_norm = layer_norm, .norm_backward = norm_backward},
    .embedding = {.embedding = embedding, .embedding_backward = embedding_backward},
    .index = {.index_select = index_select,
              .index_add = index_add,
              .gather = gather,
              .scatter_add = scatter_add},
    .dropout = {.dropout = dropout},
    .optimizer = {.adamw = adamw,
                  .sgd = sgd,
                  .clip = clip,
                  .scale_flat = scale_flat,
                  .put_scalars = put_scalars},
    .random = {.normal = normal, .uniform = uniform},
    .flat = {.pack = pack, .complete = complete},
    .peers = {.reduce = reduce_peers, .copy = copy, .copies = copies},
};

}  // namespace tessera::kernels::cuda
