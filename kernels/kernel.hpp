// What every kernel looks like: a plain function over a trivially copyable argument struct.
//
// A contract header `kernels/<op>.hpp` states formula, shapes, aliasing and dtypes, and declares
// the argument structs and a struct of function pointers. `kernels/<op>.cpp` has the CPU's; another
// kind of device fills its own. Kernels read and write raw pointers, never allocate, and cut their
// work by shape alone, so bits do not depend on the number of threads.
#pragma once

#include "tessera/base/dtype.hpp"
#include "tessera/device/op.hpp"

namespace tessera::kernels {

// Runs on the stream of `exec`: at once on the CPU, submitted to exec.native_stream on CUDA. Must
// not throw.
template <class Args>
using Kernel = void (*)(const Args& args, Exec& exec);

// A kernel bound to its arguments: the body that is launched.
template <class Args>
struct Call {
  Kernel<Args> kernel;
  Args args;
  void operator()(Exec& exec) const { kernel(args, exec); }
};
template <class Args>
Call(Kernel<Args>, Args) -> Call<Args>;

// 104, the most that an argument struct may take.
inline constexpr std::size_t kArgsBytes = kBodyBytes - sizeof(void*);

}  // namespace tessera::kernels
