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
  return std::bit_cast<std::uint16_t>(T(low)) | std::uint32_t{std::bit_cast<std::uint16_t>(T(high))}
                                                    << 16;
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
  // Adds the products to d one after another.
  template <class T>
  void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    const std::uint32_t shown[] = {a[0], a[1], a[2], a[3], b0, b1};
    const std::uint64_t* const all = show(reinterpret_cast<std::uintptr_t>(shown));
    // Half of a register of the lane that has row r of a, or column r of b, at pair c.
    const auto value = [&](int reg, int r, int c, int half) {
      const auto* const of = reinterpret_cast<const std::uint32_t*>(all[r * 4 + c]);
      const auto bits = static_cast<std::uint16_t>(of[reg] >> 16 * half);
      return to_float(std::bit_cast<T>(bits));
    };
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k)
        d[i] += value(i / 2 + k / 8 * 2, lane() / 4, k % 8 / 2, k % 2) *
                value(4 + k / 8, lane() % 4 * 2 + i % 2, k % 8 / 2, k % 2);
    sync_warp();  // others have read `shown`
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
