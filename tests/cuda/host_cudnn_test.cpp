// The graphs of kernels/cuda/cudnn*.cpp over a cuDNN that computes them on the host: their
// formulas, strides, masks and groups of heads. tests/kernels/cases/attention.cpp runs over
// the same table.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "tests/emulator/control.hpp"
#include "tests/emulator/gpu_thread.hpp"
#include "tests/support/catch.hpp"

namespace {

int g_in_tiles = 0;

void enqueue(void* stream, std::function<void()> work) {
  tessera::kernels::cuda::emulator::enqueue(stream, std::move(work));
}

// Found by its name, libcudnn.so.9, when attention first runs.
void* host_cudnn() {
  static void* const library = [] {
    void* const opened = dlopen(TESSERA_HOST_CUDNN, RTLD_NOW | RTLD_GLOBAL);
    if (opened)
      reinterpret_cast<void (*)(void (*)(void*, std::function<void()>), std::int64_t)>(
          dlsym(opened, "host_cudnn"))(enqueue, 0);
    return opened;
  }();
  return library;
}
int executions() {
  return reinterpret_cast<int (*)()>(dlsym(host_cudnn(), "host_cudnn_executions"))();
}
const bool g_opened = host_cudnn() != nullptr;

}  // namespace

extern "C" const tessera::kernels::cuda::emulator::Control* tessera_emulator();
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t stream) {
  enqueue(stream, [=] { std::memset(to, byte, bytes); });
  return cudaSuccess;
}
extern "C" cublasStatus_t cublasLtCreate(cublasLtHandle_t*) { return CUBLAS_STATUS_NOT_SUPPORTED; }

namespace tessera::kernels::cuda {

void attention_in_tiles(const AttentionArgs& args, Exec& exec) {
  ++g_in_tiles;
  emulator::enqueue(exec.native_stream, [args] {
    Exec here;
    cpu_kernels().attention(args, here);
  });
}
bool attention_backward_on_tensor_cores(const AttentionBackwardArgs&, Exec&) { return false; }
void attention_backward_in_tiles(const AttentionBackwardArgs& args, Exec& exec) {
  ++g_in_tiles;
  emulator::enqueue(exec.native_stream, [args] {
    Exec here;
    cpu_kernels().attention_backward(args, here);
  });
}

constinit const Kernels kKernels = [] {
  Kernels kernels{};
  kernels.attention = attention;
  kernels.attention_backward = attention_backward;
  return kernels;
}();

}  // namespace tessera::kernels::cuda

using namespace tessera;
using namespace tessera::kernels;

TEST_CASE("backward is cuDNN's where its sums may have any order, in one execution", "[cuda]") {
  tessera_emulator()->warpgroups(false);
  REQUIRE(g_opened);
  constexpr std::int64_t kHeads = 64, kLength = 2, kDim = 8, kPart = kHeads * kLength * kDim * 2;
  alignas(256) static std::byte memory[12 * kPart];  // four parts of workspace
  AttentionBackwardArgs a{};
  const auto part = [](int i) { return memory + i * kPart; };
  a.q = part(0), a.k = part(1), a.v = part(2), a.o = part(3), a.d_o = part(4), a.lse = part(5);
  a.dq = part(6), a.dk = a.dv = part(7), a.workspace = part(8);
  a.batch = 4;
  a.heads = a.kv_heads = a.q_row = a.k_row = a.v_row = a.dq_row = a.dk_row = a.dv_row = kHeads / 4;
  a.length = kLength;
  a.head_dim = kDim;
  a.dtype = bf16;
  for (const bool deterministic : {true, false}) {
    a.deterministic = deterministic;
    const int before = executions(), in_tiles = g_in_tiles;
    Exec exec;
    cuda::attention_backward(a, exec);
    CHECK(exec.error == nullptr);
    CHECK(executions() - before == (deterministic ? 0 : 1));
    CHECK(g_in_tiles - in_tiles == (deterministic ? 1 : 0));
  }
}

TEST_CASE("cuDNN is asked for what it takes, our own kernels for the rest", "[cuda]") {
  REQUIRE(g_opened);
  alignas(256) static std::byte memory[1 << 12];
  AttentionArgs a{};
  a.q = a.k = a.v = memory;
  a.o = memory + 1024;
  a.lse = memory + 2048;
  a.scale = 1;
  a.batch = 1;
  a.length = 4;
  a.heads = a.kv_heads = a.q_row = a.k_row = a.v_row = 1;
  a.head_dim = 8;
  a.dtype = bf16;
  a.causal = true;
  // How often cuDNN and our own kernels ran.
  const auto runs = [](const AttentionArgs& args) {
    const int before = executions(), in_tiles = g_in_tiles;
    Exec exec;
    cuda::attention(args, exec);
    CHECK(exec.error == nullptr);
    CHECK(exec.note == nullptr);
    return std::pair(executions() - before, g_in_tiles - in_tiles);
  };
  CHECK(runs(a) == std::pair(1, 0));
  AttentionArgs other = a;
  other.head_dim = 4;
  CHECK(runs(other) == std::pair(0, 1));
  other = a;
  other.dtype = f32;
  CHECK(runs(other) == std::pair(0, 1));
  other = a;
  other.q = memory + 2;
  CHECK(runs(other) == std::pair(0, 1));
}
