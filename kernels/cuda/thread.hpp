// A thread of the hardware; see kernels/cuda/gpu.hpp. For nvcc.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <type_traits>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE __device__ __forceinline__
// Before a loop of which at most n turns are laid out: more would need more registers than there
// are.
#define TESSERA_PRAGMA(text) _Pragma(#text)
#define TESSERA_UNROLL(n) TESSERA_PRAGMA(unroll n)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // products of warpgroups
#define TESSERA_HAS_WARPGROUPS
#endif

namespace tessera::kernels::cuda {

class Thread {
 public:
  TESSERA_DEVICE int index() const { return static_cast<int>(threadIdx.x); }
  TESSERA_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  TESSERA_DEVICE int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  TESSERA_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  TESSERA_DEVICE std::int64_t block() const { return blockIdx.x; }
  TESSERA_DEVICE int block_y() const { return static_cast<int>(blockIdx.y); }
  TESSERA_DEVICE std::int64_t blocks() const { return gridDim.x; }
  // Over blocks in x.
  TESSERA_DEVICE std::int64_t global_index() const {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  }
  TESSERA_DEVICE std::int64_t global_threads() const {
    return std::int64_t{gridDim.x} * blockDim.x;
  }

  TESSERA_DEVICE void sync() { __syncthreads(); }
  TESSERA_DEVICE void sync_warp() { __syncwarp(); }
  // The block's shared memory from byte `offset`, 1024-byte aligned at 0.
  template <class T>
  TESSERA_DEVICE T* shared(std::size_t offset = 0) {
    extern __shared__ __align__(1024) unsigned char memory[];
    return reinterpret_cast<T*>(memory + offset);
  }

  // The value of another lane of the warp. T: 4 or 8 bytes, arithmetic.
  template <class T>
  TESSERA_DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
  }
  template <class T>
  TESSERA_DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  // Bit l: whether lane l gave true.
  TESSERA_DEVICE unsigned ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

  // 16 bytes into shared memory, both aligned; zeros where `there` is false. They lie there after
  // the thread's wait_copies(), and for others after a barrier behind it.
  TESSERA_DEVICE void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  }
  TESSERA_DEVICE void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  // Four matrices of 8 x 8 elements of 16 bits from shared memory: lane l names row l % 8 of matrix
  // l / 8, 8 aligned elements, and gets of each matrix elements 2 (l % 4) and the next of row
  // l / 4, or of column l / 4 of those that are transposed. For the whole warp, as multiply.
  template <class T>
  TESSERA_DEVICE void load_matrices(std::uint32_t (&out)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)));
  }
  template <class T>
  TESSERA_DEVICE void load_transposed(std::uint32_t (&out)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)));
  }
  // d [16, 8] += a [16, 16] b [16, 8] on tensor cores; T: BFloat16 or Float16. Lane l has, with
  // r = l / 4 and c = 2 (l % 4), in pairs of neighbours of which the first is the lower half:
  //   a  (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8), each with the next column
  //   b  (c, r), (c + 8, r), each with the next row
  //   d  (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1)
  // Source: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
  template <class T>
  TESSERA_DEVICE void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
    if constexpr (std::is_same_v<T, BFloat16>)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  // --- products of a warpgroup, four warps of which the first is a multiple of four: sm_90 alone
  //
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
  TESSERA_DEVICE static unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
  }
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

// Where element or row `p` of rows of 128 bytes, 1024 bytes aligned, lies for a warpgroup's
// products: 16-byte pieces of a row change places by its number in 8.
template <class T>
TESSERA_DEVICE T* swizzled(T* p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  return reinterpret_cast<T*>(at ^ (at >> 7 & 7) << 4);
}

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

// Two numbers rounded to T, `low` in the lower half.
template <class T>
TESSERA_DEVICE std::uint32_t pair_of(float low, float high) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
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
