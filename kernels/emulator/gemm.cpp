// Products in the emulated module: the CPU's, queued. What cuBLASLt does has no source to emulate.
#include "kernels/cuda/emulated_thread.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/host/cpu.hpp"

namespace tessera::kernels::cuda {

void gemm(const GemmArgs& args, Exec& exec) {
  emulator::enqueue(exec.native_stream, [args] {
    Exec host;
    cpu::gemm(args, host);
  });
}

void gemm_gelu(const GemmGeluArgs& args, Exec& exec) {
  emulator::enqueue(exec.native_stream, [args] {
    Exec host;
    cpu::gemm_gelu(args, host);
  });
}

bool gemm_choice(const GemmArgs& args, int choice, Exec& exec) {
  if (choice == 0) gemm(args, exec);
  return choice == 0;
}

}  // namespace tessera::kernels::cuda
