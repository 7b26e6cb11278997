// What a thread of the hardware does by itself, with its block and with its warp; see
// kernels/cuda/gpu.hpp. For nvcc.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE __device__ __forceinline__
// Before a loop of which at most n turns are laid out: more would need more registers than there
// are.
#define TESSERA_PRAGMA(text) _Pragma(#text)
#define TESSERA_UNROLL(n) TESSERA_PRAGMA(unroll n)

namespace tessera::kernels::cuda {

class WarpThread {
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

 protected:
  TESSERA_DEVICE static unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
  }
};

}  // namespace tessera::kernels::cuda
