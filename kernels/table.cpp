#include "kernels/table.hpp"

#include "kernels/host/cpu.hpp"
#include "tessera/device/driver.hpp"

namespace tessera::kernels {
namespace {

constinit const Kernels kCpuKernels = {
    .elementwise = {.unary = cpu::unary,
                    .binary = cpu::binary,
                    .scalar = cpu::scalar,
                    .where = cpu::where,
                    .fill = cpu::fill,
                    .arange = cpu::arange,
                    .axpby = cpu::axpby,
                    .swiglu = cpu::swiglu,
                    .swiglu_backward = cpu::swiglu_backward},
    .reduce = {.reduce = cpu::reduce, .sumsq_flat = cpu::sumsq_flat},
    .gemm = {.gemm = cpu::gemm, .gemm_gelu = cpu::gemm_gelu},
    .softmax = {.softmax = cpu::softmax, .softmax_backward = cpu::softmax_backward},
    .cross_entropy = {.cross_entropy = cpu::cross_entropy,
                      .cross_entropy_backward = cpu::cross_entropy_backward},
    .attention = {.attention = cpu::attention, .attention_backward = cpu::attention_backward},
    .rope = {.rope = cpu::rope, .rope_table = cpu::rope_table},
    .norm = {.rms_norm = cpu::rms_norm,
             .layer_norm = cpu::layer_norm,
             .norm_backward = cpu::norm_backward},
    .embedding = {.embedding = cpu::embedding, .embedding_backward = cpu::embedding_backward},
    .index = {.index_select = cpu::index_select,
              .index_add = cpu::index_add,
              .gather = cpu::gather,
              .scatter_add = cpu::scatter_add},
    .dropout = {.dropout = cpu::dropout},
    .optimizer = {.adamw = cpu::adamw,
                  .sgd = cpu::sgd,
                  .clip = cpu::clip,
                  .scale_flat = cpu::scale_flat,
                  .put_scalars = cpu::put_scalars},
    .random = {.normal = cpu::normal, .uniform = cpu::uniform},
    .flat = {.pack = cpu::pack, .complete = cpu::complete},
    .peers = {.reduce = cpu::reduce_peers, .copy = cpu::copy, .copies = cpu::copies},
};

}  // namespace

const Kernels& cpu_kernels() { return kCpuKernels; }

}  // namespace tessera::kernels

namespace tessera {

constinit const std::uint32_t kKernelsBytes = sizeof(kernels::Kernels);

}  // namespace tessera
