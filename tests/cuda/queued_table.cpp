// The table of a driver module for tests: each kernel is the CPU's, queued on the stream. With the
// emulator's streams, events and memory it is a device on which everything above the table runs at
// the speed of the host, and with the CPU's values.
#include <vector>

#include "kernels/cuda/emulated_thread.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {
namespace {

template <auto group, auto member, class Args>
void queued(const Args& args, Exec& exec) {
  emulator::enqueue(exec.native_stream, [args] {
    Exec here;
    (cpu_kernels().*group.*member)(args, here);
  });
}

// Twice the product where TF32 is allowed: so a test sees that the flag has come through.
void queued_gemm(const GemmArgs& args, Exec& exec) {
  GemmArgs own = args;
  if (args.tf32) own.alpha *= 2;
  queued<&Kernels::gemm, &Gemm::gemm>(own, exec);
}

// Arrays on the host are gone when the work runs.
void queued_peers(const PeersArgs& args, Exec& exec) {
  emulator::enqueue(exec.native_stream, [args, inputs = std::vector<const void*>(
                                                   args.inputs, args.inputs + args.n_inputs)] {
    Exec here;
    PeersArgs own = args;
    own.inputs = inputs.data();
    cpu_kernels().peers.reduce(own, here);
  });
}
void queued_copies(const CopiesArgs& args, Exec& exec) {
  emulator::enqueue(
      exec.native_stream, [list = std::vector<CopyArgs>(args.copies, args.copies + args.count)] {
        Exec here;
        cpu_kernels().peers.copies({list.data(), static_cast<std::int32_t>(list.size())}, here);
      });
}

}  // namespace

constinit const Kernels kKernels = {
    .elementwise = {.unary = queued<&Kernels::elementwise, &Elementwise::unary>,
                    .binary = queued<&Kernels::elementwise, &Elementwise::binary>,
                    .scalar = queued<&Kernels::elementwise, &Elementwise::scalar>,
                    .where = queued<&Kernels::elementwise, &Elementwise::where>,
                    .fill = queued<&Kernels::elementwise, &Elementwise::fill>,
                    .arange = queued<&Kernels::elementwise, &Elementwise::arange>,
                    .axpby = queued<&Kernels::elementwise, &Elementwise::axpby>,
                    .swiglu = queued<&Kernels::elementwise, &Elementwise::swiglu>,
                    .swiglu_backward =
                        queued<&Kernels::elementwise, &Elementwise::swiglu_backward>},
    .reduce = {.reduce = queued<&Kernels::reduce, &Reduce::reduce>,
               .sumsq_flat = queued<&Kernels::reduce, &Reduce::sumsq_flat>},
    .gemm = {.gemm = queued_gemm, .gemm_gelu = queued<&Kernels::gemm, &Gemm::gemm_gelu>},
    .softmax = {.softmax = queued<&Kernels::softmax, &Softmax::softmax>,
                .softmax_backward = queued<&Kernels::softmax, &Softmax::softmax_backward>},
    .cross_entropy = {.cross_entropy =
                          queued<&Kernels::cross_entropy, &CrossEntropy::cross_entropy>,
                      .cross_entropy_backward =
                          queued<&Kernels::cross_entropy, &CrossEntropy::cross_entropy_backward>},
    .attention = {.attention = queued<&Kernels::attention, &Attention::attention>,
                  .attention_backward =
                      queued<&Kernels::attention, &Attention::attention_backward>},
    .rope = {.rope = queued<&Kernels::rope, &Rope::rope>,
             .rope_table = queued<&Kernels::rope, &Rope::rope_table>},
    .norm = {.rms_norm = queued<&Kernels::norm, &Norm::rms_norm>,
             .layer_norm = queued<&Kernels::norm, &Norm::layer_norm>,
             .norm_backward = queued<&Kernels::norm, &Norm::norm_backward>},
    .embedding = {.embedding = queued<&Kernels::embedding, &Embedding::embedding>,
                  .embedding_backward =
                      queued<&Kernels::embedding, &Embedding::embedding_backward>},
    .index = {.index_select = queued<&Kernels::index, &Index::index_select>,
              .index_add = queued<&Kernels::index, &Index::index_add>,
              .gather = queued<&Kernels::index, &Index::gather>,
              .scatter_add = queued<&Kernels::index, &Index::scatter_add>},
    .dropout = {.dropout = queued<&Kernels::dropout, &Dropout::dropout>},
    .optimizer = {.adamw = queued<&Kernels::optimizer, &Optimizer::adamw>,
                  .sgd = queued<&Kernels::optimizer, &Optimizer::sgd>,
                  .clip = queued<&Kernels::optimizer, &Optimizer::clip>,
                  .scale_flat = queued<&Kernels::optimizer, &Optimizer::scale_flat>,
                  .put_scalars = queued<&Kernels::optimizer, &Optimizer::put_scalars>},
    .random = {.normal = queued<&Kernels::random, &Random::normal>,
               .uniform = queued<&Kernels::random, &Random::uniform>},
    .flat = {.pack = queued<&Kernels::flat, &Flat::pack>,
             .complete = queued<&Kernels::flat, &Flat::complete>},
    .peers = {.reduce = queued_peers,
              .copy = queued<&Kernels::peers, &Peers::copy>,
              .copies = queued_copies},
};

}  // namespace tessera::kernels::cuda
