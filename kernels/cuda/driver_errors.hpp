// What the driver answers with: one line for an error, in memory of the calling thread, which its
// next error overwrites.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

#include "tessera/detail/device/driver.hpp"

namespace tessera::kernels::cuda {

struct ErrorLine {
  char text[512];
};
ErrorLine& error_line();  // the calling thread's

template <class... Parts>
DriverError line(const char* format, Parts... parts) {
  ErrorLine& error = error_line();
  std::snprintf(error.text, sizeof error.text, format, parts...);
  return error.text;
}

// Null for success; else names `call`, and what one can do where something can be said. The
// runtime's own note of the error is taken back, or the next launch would report it again.
DriverError said(const char* call, cudaError_t code);

}  // namespace tessera::kernels::cuda
