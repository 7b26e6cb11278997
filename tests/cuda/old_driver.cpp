// A libcuda.so.1 for tests: as much of NVIDIA's driver as the CUDA runtime looks at before it says
// that the driver is too old, or that there is no device. TESSERA_TEST_CUDA is the version that it
// claims, 12020 for CUDA 12.2; 0 for the newest, of a machine without a device.
#include <cstdlib>
#include <cstring>

namespace {

int claimed() {
  const char* const version = std::getenv("TESSERA_TEST_CUDA");
  return version ? std::atoi(version) : 0;
}
int version(int* out) {
  *out = claimed() != 0 ? claimed() : 99000;
  return 0;
}
int initialize(unsigned) { return claimed() != 0 ? 0 : 100; }  // CUDA_ERROR_NO_DEVICE
int unknown() { return 500; }                                  // CUDA_ERROR_NOT_FOUND

}  // namespace

extern "C" [[gnu::visibility("default")]] int cuGetProcAddress_v2(const char* name, void** function,
                                                                  int, unsigned long, int* found) {
  if (found) *found = 0;
  if (std::strcmp(name, "cuDriverGetVersion") == 0)
    *function = reinterpret_cast<void*>(version);
  else if (std::strcmp(name, "cuInit") == 0)
    *function = reinterpret_cast<void*>(initialize);
  else if (std::strcmp(name, "cuGetProcAddress") == 0)
    *function = reinterpret_cast<void*>(cuGetProcAddress_v2);
  else
    *function = reinterpret_cast<void*>(unknown);
  return 0;
}

extern "C" [[gnu::visibility("default")]] int cuGetProcAddress(const char* name, void** function,
                                                               int cuda_version,
                                                               unsigned long flags) {
  return cuGetProcAddress_v2(name, function, cuda_version, flags, nullptr);
}
extern "C" [[gnu::visibility("default")]] int cuDriverGetVersion(int* out) { return version(out); }
extern "C" [[gnu::visibility("default")]] int cuInit(unsigned flags) { return initialize(flags); }
