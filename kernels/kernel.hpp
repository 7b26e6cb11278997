// What every kernel looks like: a plain function over a trivially copyable argument struct.
//
// A contract header `kernels/<op>.hpp` states formula, shapes, aliasing and dtypes, and declares
// the argument structs; `kernels/kernels.def` lists all kernels. `kernels/<op>.cpp` has the CPU's
// body, `kernels/<op>.cu` the GPU's. Kernels read and write raw pointers, never allocate, and cut
// their work by shape alone, so bits do not depend on the number of threads.
#pragma once

#include <type_traits>

#include "tessera/base/dtype.hpp"
#include "tessera/device/op.hpp"

namespace tessera::kernels {

// 120, the most that an argument struct may take: with the kernel's address it fills a body.
inline constexpr std::size_t kArgsBytes = kBodyBytes - sizeof(void*);

template <class Args>
concept KernelArgs = std::is_trivially_copyable_v<Args> && sizeof(Args) <= kArgsBytes;

// Runs on the stream of `exec`: at once on the CPU, submitted to exec.native_stream on CUDA. Must
// not throw.
template <KernelArgs Args>
using Kernel = void (*)(const Args& args, Exec& exec);

// How many kernels a GPU starts for a call; a contract that starts more than one has an overload.
template <KernelArgs Args>
constexpr int launches_of(const Args& /*args*/) {
  return 1;
}

// A kernel bound to its arguments: the body that is launched.
template <KernelArgs Args>
struct Call {
  Kernel<Args> kernel;
  Args args;
  void operator()(Exec& exec) const { kernel(args, exec); }
};
template <KernelArgs Args>
Call(Kernel<Args>, Args) -> Call<Args>;

// base/dtype.hpp's visit over the dtypes in which kernels compute; those that values are only
// stored in do nothing.
template <class F>
void visit_computed(DType dtype, F f) {
  visit(dtype, [&](auto tag) {
    if constexpr (!is_storage_only(dtype_of<typename decltype(tag)::type>())) f(tag);
  });
}

// The same with u8, for kernels that move elements.
template <class F>
void visit_moved(DType dtype, F f) {
  if (dtype == DType::u8) return f(TypeTag<std::uint8_t>{});
  visit_computed(dtype, f);
}

}  // namespace tessera::kernels
