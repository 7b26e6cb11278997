// A thread of the hardware, with its warpgroup; functions of numbers, and launches; see
// kernels/cuda/gpu.hpp. For nvcc.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>

#include "kernels/cuda/hardware/warp.hpp"
// needs TESSERA_DEVICE
#include "kernels/cuda/swizzle.hpp"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // products of warpgroups
#define TESSERA_HAS_WARPGROUPS
#endif

namespace tessera::kernels::cuda {

// Beside its warp's, products of a warpgroup, four warps of which the first is a multiple of four:
// sm_90 alone.
class Thread : public WarpThread {
 public:
  // A matrix of 16-bit elements in shared memory: rows of 64 elements, swizzled (`swizzled`), 1024
  // bytes aligned. `+ n` begins n elements on: whole 8 rows, and 16 elements of a row.
  struct Matrix {
    unsigned code;
    TESSERA_DEVICE Matrix operator+(int elements) const {
      return {code + static_cast<unsigned>(elements / 8)};
    }
    // Source: PTX ISA, "Matrix descriptor": rows of 128 bytes, 8 of them after each 1024.
    TESSERA_DEVICE std::uint64_t descriptor() const {
      return code | std::uint64_t{0x40000040} << 32;
    }
  };
  template <class T>
  TESSERA_DEVICE static Matrix matrix(const T* p) {
    return {shared_address(p) >> 4 | 1 << 16};
  }
  // d [64, 64] += a [64, 16] b [16, 64], or d = a b unless `adds`, queued, for all threads of the
  // warpgroup. Warp w of it has rows 16 w and the next of a and d, laid out as multiply has them:
  // d[j] are columns 8 j and the next. In shared memory a has 64 rows of 16 elements; multiply_rows
  // takes b by its rows, 16 of 64, and multiply_columns by its columns, 64 rows of 16. d and what
  // is read, a's registers too, are left alone until wait_products. Source: PTX ISA, "Asynchronous
  // warpgroup level matrix instructions".
  template <class T>
  TESSERA_DEVICE void multiply_rows(float (&d)[8][4], const std::uint32_t (&a)[4], Matrix b) {
    multiply_registers<T>(d, a, b.descriptor());
  }
  template <class T>
  TESSERA_DEVICE void multiply_columns(float (&d)[8][4], Matrix a, Matrix b, bool adds = true) {
    multiply_shared<T>(d, a.descriptor(), b.descriptor(), adds);
  }
  // Before the first product, and before one whose registers the thread has touched since they
  // were last a product's.
  TESSERA_DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  // What was queued since the last is a group.
  TESSERA_DEVICE void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // Until all groups but the newest kLeft are done. `d`: whose sums they are.
  template <int kLeft, class... D>
  TESSERA_DEVICE void wait_products(D&... d) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
    (hold(d), ...);
  }
  // wait_copies(), for products to read after a barrier.
  TESSERA_DEVICE void wait_copies_for_products() {
    wait_copies();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

 private:
  // The compiler neither moves these into other registers nor reads them earlier.
  template <int n>
  TESSERA_DEVICE static void hold(float (&d)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
  }
  template <int n>
  TESSERA_DEVICE static void hold(float (&d)[n][8][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i) hold(d[i]);
  }

#define TESSERA_SUMS_OF(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define TESSERA_SUMS(d)                                                                       \
  TESSERA_SUMS_OF(d, 0), TESSERA_SUMS_OF(d, 1), TESSERA_SUMS_OF(d, 2), TESSERA_SUMS_OF(d, 3), \
      TESSERA_SUMS_OF(d, 4), TESSERA_SUMS_OF(d, 5), TESSERA_SUMS_OF(d, 6), TESSERA_SUMS_OF(d, 7)
#define TESSERA_WGMMA(type, operands)                                                            \
  "{.reg .pred p; setp.ne.b32 p, %32, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type       \
  "." type                                                                                       \
  " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " operands ";}"
  template <class T>
  TESSERA_DEVICE static void multiply_registers(float (&d)[8][4], const std::uint32_t (&a)[4],
                                                std::uint64_t b) {
    if constexpr (std::is_same_v<T, BFloat16>)
      asm volatile(TESSERA_WGMMA("bf16", "{%33, %34, %35, %36}, %37, p, 1, 1, 1")
                   : TESSERA_SUMS(d)
                   : "r"(1), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
      asm volatile(TESSERA_WGMMA("f16", "{%33, %34, %35, %36}, %37, p, 1, 1, 1")
                   : TESSERA_SUMS(d)
                   : "r"(1), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
  template <class T>
  TESSERA_DEVICE static void multiply_shared(float (&d)[8][4], std::uint64_t a, std::uint64_t b,
                                             bool adds) {
    if constexpr (std::is_same_v<T, BFloat16>)
      asm volatile(TESSERA_WGMMA("bf16", "%33, %34, p, 1, 1, 0, 0")
                   : TESSERA_SUMS(d)
                   : "r"(int{adds}), "l"(a), "l"(b));
    else
      asm volatile(TESSERA_WGMMA("f16", "%33, %34, p, 1, 1, 0, 0")
                   : TESSERA_SUMS(d)
                   : "r"(int{adds}), "l"(a), "l"(b));
  }
#undef TESSERA_SUMS_OF
#undef TESSERA_SUMS
#undef TESSERA_WGMMA
};

// Conversions of 16-bit floats; rounding to nearest even.
TESSERA_DEVICE float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
TESSERA_DEVICE float to_float(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }
TESSERA_DEVICE void from_float(float value, BFloat16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
TESSERA_DEVICE void from_float(float value, Float16& out) {
  out.bits = __half_as_ushort(__float2half_rn(value));
}

// Two numbers rounded to T of 16 or 8 bits, `low` in the lower half of as many bits. 8-bit ones are
// within T's range, or NaN.
template <class T>
TESSERA_DEVICE std::uint32_t pair_of(float low, float high) {
  std::uint32_t bits = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else if constexpr (std::is_same_v<T, Float16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint16_t codes;
    if constexpr (std::is_same_v<T, Float8E4M3>)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    bits = codes;
#else
    bits = T(low).bits | std::uint32_t{T(high).bits} << 8;
#endif
  }
  return bits;
}

// The larger of `most` and the magnitude of `pair`, of each of two numbers of T of 16 bits; a NaN
// loses.
template <class T>
TESSERA_DEVICE std::uint32_t larger_magnitudes(std::uint32_t most, std::uint32_t pair) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(most), "r"(pair & 0x7fff7fffu));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(most), "r"(pair & 0x7fff7fffu));
  return bits;
}

// In one access; the address is aligned.
template <class T>
TESSERA_DEVICE T load_whole(const void* from) {
  return *static_cast<const T*>(from);
}
// 16 bytes.
TESSERA_DEVICE void store_whole(void* to, const void* from) {
  uint4 bytes;
  memcpy(&bytes, from, sizeof bytes);
  __stwb(static_cast<uint4*>(to), bytes);
}

// 2^x in one instruction, within 2 ulp; 0 below 2^-126.
TESSERA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// exp in two instructions: within 2 + 1.173 |x| ulp, as __expf, which without -ftz takes five; 0
// below 2^-126.
TESSERA_DEVICE float exp_fast(float x) { return exp2_fast(x * 1.44269504f); }
TESSERA_DEVICE double exp_fast(double x) { return exp(x); }
// The larger, or NaN if one is NaN.
TESSERA_DEVICE float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
TESSERA_DEVICE double larger(double a, double b) { return a > b || a != a ? a : b; }
// x, computed anew where it is used: the compiler does not keep it in a register over a loop.
TESSERA_DEVICE int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// a b, rounded: never part of a fused a b + c, which the compiler makes on its own.
TESSERA_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
TESSERA_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }
// a / b within 2 units in the last place for 2^-126 <= |b| <= 2^126; 0 above, as for infinity.
TESSERA_DEVICE float fast_quotient(float a, float b) { return __fdividef(a, b); }
TESSERA_DEVICE double fast_quotient(double a, double b) { return a / b; }

// Blocks that a multiprocessor is to run at once, whatever registers each would like:
// Body::kBlocks. 0: the compiler's choice.
template <class Body>
constexpr int blocks_of() {
  if constexpr (requires { Body::kBlocks; })
    return Body::kBlocks;
  else
    return 0;
}

template <int kThreads, class Body>
__global__ void __launch_bounds__(kThreads, blocks_of<Body>())
    run_body(const __grid_constant__ Body body) {
  Thread thread;
  body(thread);
}

// Whether a launch was refused, which `exec` then says and the runtime forgets: what is launched
// next is not at fault. The line lasts until the thread's next refusal.
inline bool is_refused(Exec& exec, cudaError_t status, Grid grid, int threads,
                       std::size_t shared_bytes) {
  if (status == cudaSuccess) return false;
  static thread_local char line[160];
  std::snprintf(line, sizeof line,
                "a grid of %lld x %lld x %lld blocks of %d threads and %zu bytes of shared memory: "
                "%s",
                static_cast<long long>(grid.x), static_cast<long long>(grid.y),
                static_cast<long long>(grid.z), threads, shared_bytes, cudaGetErrorString(status));
  exec.error = line;
  static_cast<void>(cudaGetLastError());
  return true;
}

// Queues `body` on the stream of `exec` for `grid` blocks of kThreads threads with `shared_bytes`
// of shared memory. An empty grid is nothing.
template <int kThreads, class Body>
void launch(Exec& exec, Grid grid, std::size_t shared_bytes, const Body& body) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || exec.error) return;
  constexpr std::int64_t kMost = 0x7fffffff;  // blocks in x; in y and z the driver looks itself
  if (grid.x > kMost) {
    is_refused(exec, cudaErrorInvalidConfiguration, grid, kThreads, shared_bytes);
    return;
  }
  const auto kernel = run_body<kThreads, Body>;
  if (shared_bytes > kSharedBytes) {
    const cudaError_t refused = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (is_refused(exec, refused, grid, kThreads, shared_bytes)) return;
  }
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                static_cast<unsigned>(grid.z)),
           kThreads, shared_bytes, static_cast<cudaStream_t>(exec.native_stream)>>>(body);
  is_refused(exec, cudaPeekAtLastError(), grid, kThreads, shared_bytes);
}

}  // namespace tessera::kernels::cuda
