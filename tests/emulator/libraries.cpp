// What libraries compute, in the emulated module. Products are the CPU's, queued: what cuBLASLt
// does has no source to emulate. Attention is our own kernels'.
#include "kernels/cuda/kernels.hpp"
#include "kernels/host/cpu.hpp"
#include "tests/emulator/gpu_thread.hpp"

namespace tessera::kernels::cuda {

void gemm(const GemmArgs& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args);
  if (exec.error) return;
  emulator::enqueue_kernel(exec.native_stream, [args] {
    Exec host;
    cpu::gemm(args, host);
  });
}

void gemm_gelu(const GemmGeluArgs& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args);
  if (exec.error) return;
  emulator::enqueue_kernel(exec.native_stream, [args] {
    Exec host;
    cpu::gemm_gelu(args, host);
  });
}

void gemm_fp8(const GemmFp8Args& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args);
  if (exec.error) return;
  emulator::enqueue_kernel(exec.native_stream, [args] {
    Exec host;
    cpu::gemm_fp8(args, host);
  });
}

void attention(const AttentionArgs& args, Exec& exec) { attention_in_tiles(args, exec); }
void attention_backward(const AttentionBackwardArgs& args, Exec& exec) {
  if (!attention_backward_on_tensor_cores(args, exec)) attention_backward_in_tiles(args, exec);
}

bool gemm_choice(const GemmArgs& args, int choice, Exec& exec) {
  if (choice == 0) gemm(args, exec);
  return choice == 0;
}

}  // namespace tessera::kernels::cuda
