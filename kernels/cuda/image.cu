// A kernel that does nothing: whether a device can load it says whether this module was built for
// that device. For driver.cpp.
#include <cuda_runtime.h>

namespace tessera::kernels::cuda {
namespace {

__global__ void nothing() {}

}  // namespace

const void* image_probe() { return reinterpret_cast<const void*>(&nothing); }

}  // namespace tessera::kernels::cuda
