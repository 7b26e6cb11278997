// What a thread of the emulated GPU does by itself, with its block and with its warp; see
// kernels/cuda/gpu.hpp. For every compiler but nvcc.
//
// The threads of a block are fibers of one host thread and take turns; a turn ends at a barrier or
// a shuffle, and a barrier is passed when all live threads have come. Turns go forward and backward
// alternately, so that a result that hangs on their order shows. Shared memory is exactly as large
// as asked for and filled with NaN before each block.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE inline
#define TESSERA_UNROLL(n)

namespace tessera::kernels::cuda {

inline float to_float(BFloat16 x) { return x; }
inline float to_float(Float16 x) { return x; }
inline void from_float(float value, BFloat16& out) { out = BFloat16(value); }
inline void from_float(float value, Float16& out) { out = Float16(value); }

template <class T>
std::uint32_t pair_of(float low, float high) {
  return T(low).bits | std::uint32_t{T(high).bits} << 8 * sizeof(T);
}

template <class T>
std::uint32_t larger_magnitudes(std::uint32_t most, std::uint32_t pair) {
  const auto larger = [](std::uint32_t a, std::uint32_t b) {
    T x, y;
    x.bits = static_cast<std::uint16_t>(a);
    y.bits = static_cast<std::uint16_t>(b & 0x7fff);
    return std::uint32_t{to_float(y) > to_float(x) ? y.bits : x.bits};
  };
  return larger(most & 0xffff, pair & 0xffff) | larger(most >> 16, pair >> 16) << 16;
}

class EmulatedBlock;

class WarpThread {
 public:
  WarpThread(EmulatedBlock& block, int index) : block_(&block), index_(index) {}

  int index() const { return index_; }
  int lane() const { return index_ % kWarp; }
  int warp() const { return index_ / kWarp; }
  int threads() const;
  std::int64_t block() const;
  int block_y() const;
  std::int64_t blocks() const;
  std::int64_t global_index() const { return block() * threads() + index_; }
  std::int64_t global_threads() const { return blocks() * threads(); }

  void sync();
  void sync_warp();
  template <class T>
  T* shared(std::size_t offset = 0) {
    return reinterpret_cast<T*>(shared_memory() + offset);
  }

  template <class T>
  T shuffle(T value, int lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = exchange(bits, lane % kWarp);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  template <class T>
  T shuffle_xor(T value, int mask) {
    return shuffle(value, lane() ^ mask);
  }
  unsigned ballot(bool value);

  // Comes as late as it may: until then what lies there is NaN.
  void copy_async(void* to, const void* from, bool there) {
    std::memset(to, 0xff, 16);
    copies_.push_back({to, there ? from : nullptr});
  }
  void wait_copies() {
    for (const auto& [to, from] : copies_)
      from ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
    copies_.clear();
  }

  template <class T>
  void load_matrices(std::uint32_t (&out)[4], const T* row) {
    static_assert(sizeof(T) == 2);
    const std::uint64_t* const rows = show(reinterpret_cast<std::uintptr_t>(row));
    for (int i = 0; i < 4; ++i)
      out[i] = bits_of(&row_at<T>(rows, i, lane() / 4)[lane() % 4 * 2],
                       &row_at<T>(rows, i, lane() / 4)[lane() % 4 * 2 + 1]);
  }
  template <class T>
  void load_transposed(std::uint32_t (&out)[4], const T* row) {
    static_assert(sizeof(T) == 2);
    const std::uint64_t* const rows = show(reinterpret_cast<std::uintptr_t>(row));
    for (int i = 0; i < 4; ++i)
      out[i] = bits_of(&row_at<T>(rows, i, lane() % 4 * 2)[lane() / 4],
                       &row_at<T>(rows, i, lane() % 4 * 2 + 1)[lane() / 4]);
  }
  // Adds the products to d one after another: one lane for the whole warp, whose operands are
  // converted once.
  template <class T>
  void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    struct Operands {
      float* d;
      const std::uint32_t* a;
      std::uint32_t b[2];
    };
    const Operands own{d, a, {b0, b1}};
    const std::uint64_t* const all = show(reinterpret_cast<std::uintptr_t>(&own));
    const auto of = [&](int line, int pair) -> const Operands& {  // row of a, column of b
      return *reinterpret_cast<const Operands*>(all[line % 8 * 4 + pair]);
    };
    if (lane() == 0) {
      float x[16][16], y[16][8];
      for (int k = 0; k < 16; ++k) {
        const auto half = [k](std::uint32_t bits) {
          return to_float(std::bit_cast<T>(static_cast<std::uint16_t>(bits >> k % 2 * 16)));
        };
        for (int r = 0; r < 16; ++r) x[r][k] = half(of(r, k % 8 / 2).a[r / 8 + k / 8 * 2]);
        for (int n = 0; n < 8; ++n) y[k][n] = half(of(n, k % 8 / 2).b[k / 8]);
      }
      for (int r = 0; r < 16; ++r)
        for (int n = 0; n < 8; ++n) {
          float& sum = of(r, n / 2).d[r / 8 * 2 + n % 2];
          for (int k = 0; k < 16; ++k) sum += x[r][k] * y[k][n];
        }
    }
    sync_warp();  // `own` has been read
  }

 protected:
  // What each lane of the warp shows, to be read before the next exchange but one.
  const std::uint64_t* show(std::uint64_t bits);

  EmulatedBlock* block_;

 private:
  struct Copy {
    void* to;
    const void* from;  // null for zeros
  };

  template <class T>
  static const T* row_at(const std::uint64_t* rows, int matrix, int row) {
    return reinterpret_cast<const T*>(rows[matrix * 8 + row]);
  }
  template <class T>
  static std::uint32_t bits_of(const T* low, const T* high) {
    return std::bit_cast<std::uint16_t>(*low) | std::uint32_t{std::bit_cast<std::uint16_t>(*high)}
                                                    << 16;
  }
  std::byte* shared_memory();
  std::uint64_t exchange(std::uint64_t bits, int lane);

  int index_;
  std::vector<Copy> copies_;
};

}  // namespace tessera::kernels::cuda
