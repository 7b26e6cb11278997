// The table of a driver module for tests: each kernel is the CPU's, queued on the stream. With the
// emulated GPU's streams, events and memory it is a device on which everything above the table runs
// at the speed of the host, and with the CPU's values.
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "tests/emulator/gpu_thread.hpp"

namespace tessera::kernels::cuda {
namespace {

template <auto member, class Args>
void queued(const Args& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args);
  if (exec.error) return;
  emulator::enqueue(exec.native_stream, [args] {
    Exec here;
    (cpu_kernels().*member)(args, here);
  });
}

// Twice the product where TF32 is allowed: so a test sees that the flag has come through.
void queued_gemm(const GemmArgs& args, Exec& exec) {
  GemmArgs own = args;
  if (args.tf32) own.alpha *= 2;
  queued<&Kernels::gemm>(own, exec);
}

// Arrays on the host are gone when the work runs.
void queued_peers(const PeersArgs& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args);
  if (!exec.error)
    exec.error = emulator::refusal(exec.native_stream, args.inputs,
                                   static_cast<std::size_t>(args.n_inputs) * sizeof(void*));
  if (exec.error) return;
  emulator::enqueue(exec.native_stream, [args, inputs = std::vector<const void*>(
                                                   args.inputs, args.inputs + args.n_inputs)] {
    Exec here;
    PeersArgs own = args;
    own.inputs = inputs.data();
    cpu_kernels().reduce_peers(own, here);
  });
}
void queued_copies(const CopiesArgs& args, Exec& exec) {
  exec.error = emulator::refusal(exec.native_stream, args.copies,
                                 static_cast<std::size_t>(args.count) * sizeof(CopyArgs));
  if (exec.error) return;
  emulator::enqueue(
      exec.native_stream, [list = std::vector<CopyArgs>(args.copies, args.copies + args.count)] {
        Exec here;
        cpu_kernels().copies({list.data(), static_cast<std::int32_t>(list.size())}, here);
      });
}

}  // namespace

constinit const Kernels kKernels = [] {
  Kernels kernels{
#define TESSERA_KERNEL(name, Args) .name = queued<&Kernels::name>,
#include "kernels/kernels.def"
  };
  kernels.gemm = queued_gemm;
  kernels.reduce_peers = queued_peers;
  kernels.copies = queued_copies;
  return kernels;
}();

}  // namespace tessera::kernels::cuda
