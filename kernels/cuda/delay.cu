// A kernel that keeps its stream busy without touching memory, so that others overtake it. For
// driver.cpp.
#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::kernels::cuda {
namespace {

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void spin(unsigned long long duration) {
  const unsigned long long begin = nanoseconds();
  while (nanoseconds() - begin < duration) __nanosleep(200);
}

}  // namespace

cudaError_t launch_delay(std::int64_t duration_ns, cudaStream_t stream) {
  spin<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(duration_ns));
  return cudaPeekAtLastError();
}

}  // namespace tessera::kernels::cuda
