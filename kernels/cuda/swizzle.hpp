// Where tiles lie for a warpgroup's products. Behind the header that says what TESSERA_DEVICE is.
#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

// Where element or row `p` of rows of 128 bytes, 1024 bytes aligned, lies: 16-byte pieces of a row
// change places by its number in 8. Source: PTX ISA, "Asynchronous warpgroup level matrix shared
// memory layout", 128-byte swizzling.
template <class T>
TESSERA_DEVICE T* swizzled(T* p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  return reinterpret_cast<T*>(at ^ (at >> 7 & 7) << 4);
}

}  // namespace tessera::kernels::cuda
