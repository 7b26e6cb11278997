#include "kernels/cuda/driver_errors.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kLeastDriver = CUDART_VERSION >= 13000 ? 580 : 525;  // of NVIDIA, for this runtime

// What one can do about an error, where something can be said.
const char* remedy(cudaError_t code) {
  switch (code) {
    case cudaErrorNoDevice:
      return "; is a GPU visible (nvidia-smi, CUDA_VISIBLE_DEVICES)?";
    case cudaErrorInvalidDevice:
      return "; nvidia-smi lists the devices there are";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return "; an earlier kernel went outside its memory: start the process again under "
             "compute-sanitizer, which names the kernel";
    case cudaErrorNoKernelImageForDevice:
      return "; build the module for this device with -Dgpu_archs";
    case cudaErrorDevicesUnavailable:
      return "; is another process holding the device in exclusive mode?";
    default:
      return "";
  }
}

}  // namespace

ErrorLine& error_line() {
  thread_local ErrorLine error;
  return error;
}

DriverError said(const char* call, cudaError_t code) {
  if (code == cudaSuccess) return nullptr;
  cudaGetLastError();
  int driver = 0;
  if (code == cudaErrorInsufficientDriver || code == cudaErrorSystemDriverMismatch) {
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
      return line("%s: there is no NVIDIA driver (libcuda.so.1); install %d or newer", call,
                  kLeastDriver);
    return line(
        "%s: the NVIDIA driver knows CUDA up to %d.%d, this module needs %d.%d; install driver %d "
        "or newer",
        call, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
        kLeastDriver);
  }
  return line("%s: %s (%s)%s", call, cudaGetErrorString(code), cudaGetErrorName(code),
              remedy(code));
}

}  // namespace tessera::kernels::cuda
