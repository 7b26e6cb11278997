// Calls of libcuda itself, which the runtime hands out.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

namespace tessera::kernels::cuda {

inline CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

// Whether this driver has the call; null where not.
template <class F>
bool find_call(const char* name, unsigned version, F* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    found = nullptr;
  }
  std::memcpy(function, &found, sizeof found);
  return found != nullptr;
}

}  // namespace tessera::kernels::cuda
