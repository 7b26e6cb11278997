// A libcuda.so.1 for tests of cuDNN where no device is: it claims to load every kernel that it is
// given, so that a plan whose kernel has been compiled is finished, and says of all else that it is
// unknown. Nothing can run on it.
#include <cstring>

namespace {

int unknown() { return 500; }    // CUDA_ERROR_NOT_FOUND
int no_device() { return 100; }  // CUDA_ERROR_NO_DEVICE
int loaded(void** out) {
  *out = reinterpret_cast<void*>(1);  // a handle that is never looked into
  return 0;
}
int version(int* out) {
  *out = 13000;
  return 0;
}

}  // namespace

#define SHOWN extern "C" [[gnu::visibility("default")]]

// What cuDNN looks up beside and does not call.
#define UNKNOWN(name) \
  SHOWN int name() { return unknown(); }
UNKNOWN(cuCtxGetCurrent)
UNKNOWN(cuCtxGetDevice)
UNKNOWN(cuCtxGetLimit)
UNKNOWN(cuCtxPopCurrent)
UNKNOWN(cuCtxPushCurrent)
UNKNOWN(cuDeviceGet)
UNKNOWN(cuDeviceGetAttribute)
UNKNOWN(cuDeviceGetCount)
UNKNOWN(cuGetErrorName)
UNKNOWN(cuGetErrorString)
UNKNOWN(cuKernelGetAttribute)
UNKNOWN(cuLaunchCooperativeKernel)
UNKNOWN(cuLaunchKernel)
UNKNOWN(cuLaunchKernelEx)
UNKNOWN(cuLibraryLoadFromFile)
UNKNOWN(cuLinkAddData)
UNKNOWN(cuLinkComplete)
UNKNOWN(cuLinkCreate)
UNKNOWN(cuLinkDestroy)
UNKNOWN(cuOccupancyMaxPotentialClusterSize)
UNKNOWN(cuStreamGetCtx)

SHOWN int cuInit(unsigned) { return no_device(); }
SHOWN int cuDriverGetVersion(int* out) { return version(out); }
SHOWN int cuLibraryLoadData(void** library) { return loaded(library); }
SHOWN int cuLibraryGetKernel(void** kernel) { return loaded(kernel); }
SHOWN int cuLibraryUnload(void*) { return 0; }
SHOWN int cuKernelGetFunction(void** function) { return loaded(function); }
SHOWN int cuKernelSetAttribute() { return 0; }
SHOWN int cuFuncSetAttribute() { return 0; }

SHOWN int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long, int* found) {
  if (found) *found = 0;
  *function = std::strcmp(name, "cuInit") == 0               ? reinterpret_cast<void*>(cuInit)
              : std::strcmp(name, "cuDriverGetVersion") == 0 ? reinterpret_cast<void*>(version)
                                                             : reinterpret_cast<void*>(unknown);
  return 0;
}
SHOWN int cuGetProcAddress(const char* name, void** function, int cuda_version,
                           unsigned long flags) {
  return cuGetProcAddress_v2(name, function, cuda_version, flags, nullptr);
}
