// Attention where the module is built without cuDNN's headers: by our own kernels, with one line.
#include <atomic>

#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {
namespace {

void say_once(std::int64_t head_dim, DType dtype, Exec& exec) {
  static constinit std::atomic<bool> said = false;
  if (attention_suits_library(head_dim, dtype) && !said.exchange(true))
    exec.note =
        "runs by our own kernels, several times slower, because the CUDA module was built without "
        "cuDNN's headers; install them and build it again";
}

}  // namespace

void attention(const AttentionArgs& args, Exec& exec) {
  say_once(args.head_dim, args.dtype, exec);
  attention_in_tiles(args, exec);
}

void attention_backward(const AttentionBackwardArgs& args, Exec& exec) {
  if (!attention_backward_on_tensor_cores(args, exec)) attention_backward_in_tiles(args, exec);
}

}  // namespace tessera::kernels::cuda
