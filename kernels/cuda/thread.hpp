// A thread of the hardware; see kernels/cuda/gpu.hpp. For nvcc.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE __device__ __forceinline__
// Before a loop of which at most n turns are laid out: more would need more registers than there
// are.
#define TESSERA_PRAGMA(text) _Pragma(#text)
#define TESSERA_UNROLL(n) TESSERA_PRAGMA(unroll n)

namespace tessera::kernels::cuda {

class Thread {
 public:
  TESSERA_DEVICE int index() const { return static_cast<int>(threadIdx.x); }
  TESSERA_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  TESSERA_DEVICE int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  TESSERA_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  TESSERA_DEVICE std::int64_t block() const { return blockIdx.x; }
  TESSERA_DEVICE int block_y() const { return static_cast<int>(blockIdx.y); }
  TESSERA_DEVICE std::int64_t blocks() const { return gridDim.x; }
  // Over blocks in x.
  TESSERA_DEVICE std::int64_t global_index() const {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  }
  TESSERA_DEVICE std::int64_t global_threads() const {
    return std::int64_t{gridDim.x} * blockDim.x;
  }

  TESSERA_DEVICE void sync() { __syncthreads(); }
  TESSERA_DEVICE void sync_warp() { __syncwarp(); }
  // The block's shared memory from byte `offset`, 16-byte aligned at 0.
  template <class T>
  TESSERA_DEVICE T* shared(std::size_t offset = 0) {
    extern __shared__ __align__(16) unsigned char memory[];
    return reinterpret_cast<T*>(memory + offset);
  }

  // The value of another lane of the warp. T: 4 or 8 bytes, arithmetic.
  template <class T>
  TESSERA_DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
  }
  template <class T>
  TESSERA_DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  // Bit l: whether lane l gave true.
  TESSERA_DEVICE unsigned ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
};

// Conversions of 16-bit floats; rounding to nearest even.
TESSERA_DEVICE float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
TESSERA_DEVICE float to_float(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }
TESSERA_DEVICE void from_float(float value, BFloat16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
TESSERA_DEVICE void from_float(float value, Float16& out) {
  out.bits = __half_as_ushort(__float2half_rn(value));
}

// 16 bytes in one access; `to` is aligned.
TESSERA_DEVICE void store_whole(void* to, const void* from) {
  uint4 bytes;
  memcpy(&bytes, from, sizeof bytes);
  __stwb(static_cast<uint4*>(to), bytes);
}

// exp of x <= 0 in two instructions: within 2 + 1.173 |x| ulp.
TESSERA_DEVICE float exp_fast(float x) { return __expf(x); }
TESSERA_DEVICE double exp_fast(double x) { return exp(x); }
// a b, rounded: never part of a fused a b + c, which the compiler makes on its own.
TESSERA_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
TESSERA_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }
// a / b within 2 units in the last place for 2^-126 <= |b| <= 2^126; 0 above, as for infinity.
TESSERA_DEVICE float fast_quotient(float a, float b) { return __fdividef(a, b); }
TESSERA_DEVICE double fast_quotient(double a, double b) { return a / b; }

// Blocks that a multiprocessor is to run at once, whatever registers each would like:
// Body::kBlocks. 0: the compiler's choice.
template <class Body>
constexpr int blocks_of() {
  if constexpr (requires { Body::kBlocks; })
    return Body::kBlocks;
  else
    return 0;
}

template <int kThreads, class Body>
__global__ void __launch_bounds__(kThreads, blocks_of<Body>())
    run_body(const __grid_constant__ Body body) {
  Thread thread;
  body(thread);
}

// Whether a launch was refused, which `exec` then says and the runtime forgets: what is launched
// next is not at fault. The line lasts until the thread's next refusal.
inline bool is_refused(Exec& exec, cudaError_t status, Grid grid, int threads,
                       std::size_t shared_bytes) {
  if (status == cudaSuccess) return false;
  static thread_local char line[160];
  std::snprintf(line, sizeof line,
                "a grid of %lld x %lld x %lld blocks of %d threads and %zu bytes of shared memory: "
                "%s",
                static_cast<long long>(grid.x), static_cast<long long>(grid.y),
                static_cast<long long>(grid.z), threads, shared_bytes, cudaGetErrorString(status));
  exec.error = line;
  static_cast<void>(cudaGetLastError());
  return true;
}

// Queues `body` on the stream of `exec` for `grid` blocks of kThreads threads with `shared_bytes`
// of shared memory. An empty grid is nothing.
template <int kThreads, class Body>
void launch(Exec& exec, Grid grid, std::size_t shared_bytes, const Body& body) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || exec.error) return;
  constexpr std::int64_t kMost = 0x7fffffff;  // blocks in x; in y and z the driver looks itself
  if (grid.x > kMost) {
    is_refused(exec, cudaErrorInvalidConfiguration, grid, kThreads, shared_bytes);
    return;
  }
  const auto kernel = run_body<kThreads, Body>;
  if (shared_bytes > kSharedBytes) {
    const cudaError_t refused = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (is_refused(exec, refused, grid, kThreads, shared_bytes)) return;
  }
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                static_cast<unsigned>(grid.z)),
           kThreads, shared_bytes, static_cast<cudaStream_t>(exec.native_stream)>>>(body);
  is_refused(exec, cudaPeekAtLastError(), grid, kThreads, shared_bytes);
}

}  // namespace tessera::kernels::cuda
