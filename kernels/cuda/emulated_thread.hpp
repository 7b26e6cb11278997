// A thread of the emulated GPU; see kernels/cuda/gpu.hpp. For every compiler but nvcc.
//
// The threads of a block are fibers of one host thread and take turns; a turn ends at a barrier or
// a shuffle, and a barrier is passed when all live threads have come. Turns go forward and backward
// alternately, so that a result that hangs on their order shows. Shared memory is exactly as large
// as asked for and filled with NaN before each block.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numbers>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE inline
#define TESSERA_UNROLL(n)
#define TESSERA_HAS_WARPGROUPS

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

template <class T>
T* swizzled(T* p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  return reinterpret_cast<T*>(at ^ (at >> 7 & 7) << 4);
}

class Thread {
 public:
  Thread(EmulatedBlock& block, int index) : block_(&block), index_(index) {}

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

  // Products of a warpgroup come as late as they may, when they are waited for: what they read then
  // must still lie there.
  struct Matrix {
    const std::byte* data;
    Matrix operator+(int elements) const { return {data + 2 * elements}; }
    // 8 elements from a column that 8 divides.
    template <class T>
    const T* at(int row, int column) const {
      return swizzled(reinterpret_cast<const T*>(data) + row * 64 + column);
    }
  };
  template <class T>
  static Matrix matrix(const T* p) {
    return {reinterpret_cast<const std::byte*>(p)};
  }
  template <class T>
  void multiply_rows(float (&d)[8][4], const std::uint32_t (&a)[4], Matrix b) {
    queue_product<T>(d, std::to_array(a), {}, b, true, true);
  }
  template <class T>
  void multiply_columns(float (&d)[8][4], Matrix a, Matrix b, bool adds = true) {
    queue_product<T>(d, {}, a, b, false, adds);
  }
  void fence_products() { is_fenced_ = true; }
  void commit_products() { groups_.push_back(std::exchange(products_, {})); }
  // Says so where a sum that comes is none of `d`: nobody would have kept the compiler from it.
  template <int kLeft, class... D>
  void wait_products(D&... d) {
    is_fenced_ = false;
    for (; groups_.size() > kLeft; groups_.pop_front())
      for (const Product& product : groups_.front()) {
        const auto* const sums = reinterpret_cast<const std::byte*>(product.sums);
        const auto has = [&](const auto& of) {
          const auto* const begin = reinterpret_cast<const std::byte*>(&of);
          return sums >= begin && sums < begin + sizeof of;
        };
        expect((has(d) || ...), "a product has come whose sums nobody waits for");
        product.compute();
      }
  }
  void wait_copies_for_products() { wait_copies(); }

  void run();  // the body, for the fiber

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
  struct Operands {
    float (*d)[4];
    const std::uint32_t* a;
  };
  // a from registers where `left` is nowhere; b by its rows, or its columns.
  template <class T>
  void queue_product(float (&d)[8][4], std::array<std::uint32_t, 4> a, Matrix left, Matrix right,
                     bool by_rows, bool adds) {
    expect(is_fenced_, "a product without fence_products() since the last wait");
    products_.push_back(
        {&d, [this, &d, a, left, right, by_rows, adds] {
           const Operands own{d, a.data()};
           const std::uint64_t* const all = show(reinterpret_cast<std::uintptr_t>(&own));
           const auto of = [&](int r,
                               int pair) {  // the lane that has row r and this pair of columns
             return reinterpret_cast<const Operands*>(all[r % 8 * 4 + pair]);
           };
           if (lane() == 0) {  // for the whole warp, whose operands are converted once
             float x[16][16], y[16][64], sums[16][64];
             for (int r = 0; r < 16; ++r)
               for (int k = 0; k < 16; ++k) {
                 if (left.data) {
                   x[r][k] = to_float(left.at<T>(warp() % 4 * 16 + r, k / 8 * 8)[k % 8]);
                 } else {
                   const std::uint32_t bits =
                       of(r, k % 8 / 2)->a[r / 8 + k / 8 * 2] >> 16 * (k % 2);
                   x[r][k] = to_float(std::bit_cast<T>(static_cast<std::uint16_t>(bits)));
                 }
               }
             for (int k = 0; k < 16; ++k)
               for (int n = 0; n < 64; ++n)
                 y[k][n] = to_float(by_rows ? right.at<T>(k, n / 8 * 8)[n % 8]
                                            : right.at<T>(n, k / 8 * 8)[k % 8]);
             const auto sum_of = [&](int r, int n) -> float& {
               return of(r, n % 8 / 2)->d[n / 8][r / 8 * 2 + n % 2];
             };
             for (int r = 0; r < 16; ++r) {
               for (int n = 0; n < 64; ++n) sums[r][n] = adds ? sum_of(r, n) : 0;
               for (int k = 0; k < 16; ++k)
                 for (int n = 0; n < 64; ++n) sums[r][n] += x[r][k] * y[k][n];
               for (int n = 0; n < 64; ++n) sum_of(r, n) = sums[r][n];
             }
           }
           sync_warp();
         }});
  }
  // Ends the process with a line where this is not so.
  static void expect(bool holds, const char* otherwise);
  std::byte* shared_memory();
  std::uint64_t exchange(std::uint64_t bits, int lane);
  // What each lane of the warp shows, to be read before the next exchange but one.
  const std::uint64_t* show(std::uint64_t bits);

  EmulatedBlock* block_;
  int index_;
  std::vector<Copy> copies_;
  struct Product {
    const void* sums;
    std::function<void()> compute;
  };
  using Products = std::vector<Product>;
  Products products_;  // since the last commit
  std::deque<Products> groups_;
  bool is_fenced_ = false;  // since the last wait for products
};

// What the GPU has and <cmath> lacks.
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline double sinpi(double x) { return std::sin(std::numbers::pi * x); }

template <class T>
T load_whole(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void store_whole(void* to, const void* from) { std::memcpy(to, from, 16); }
inline float exp_fast(float x) { return std::exp(x); }
inline double exp_fast(double x) { return std::exp(x); }
inline float exp2_fast(float x) { return std::exp2(x); }
template <class T>
T larger(T a, T b) {
  return a > b || a != a ? a : b;
}
inline int fresh(int x) { return x; }
inline float rounded_product(float a, float b) { return a * b; }
inline double rounded_product(double a, double b) { return a * b; }
inline float fast_quotient(float a, float b) { return a / b; }
inline double fast_quotient(double a, double b) { return a / b; }

namespace emulator {

struct Launch {
  Grid grid;
  int threads = 0;
  std::size_t shared_bytes = 0;
  void (*invoke)(const void* body, Thread& thread) = nullptr;
};

// Runs all blocks, one after another, on the calling thread.
void run(const Launch& launch, const void* body);
// Runs `work` behind what was given to `native_stream` before; at once for null.
void enqueue(void* native_stream, std::function<void()> work);
// The same of a kernel, which is counted.
void enqueue_kernel(void* native_stream, std::function<void()> work);
// What a GPU would say of work on this stream with these arguments, null where it would take it:
// the stream is another device's than the calling thread's, or an argument is an address of another
// device that this one does not reach. Looks at every aligned word of `args`.
const char* refusal(void* native_stream, const void* args, std::size_t bytes);

// Padding holds what lay on the stack before, the upper half of an address perhaps. A compiler that
// can't clear it has only the stream looked at.
#if __has_builtin(__builtin_clear_padding)
template <class Args>
std::size_t clear_padding(Args& args) {
  __builtin_clear_padding(&args);
  return sizeof args;
}
#else
template <class Args>
std::size_t clear_padding(Args&) {
  return 0;
}
#endif

template <class Args>
const char* refusal(void* native_stream, Args args) {
  const std::size_t bytes = clear_padding(args);
  return refusal(native_stream, &args, bytes);
}

}  // namespace emulator

template <int kThreads, class Body>
void launch(Exec& exec, Grid grid, std::size_t shared_bytes, const Body& body) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024 && std::is_trivially_copyable_v<Body>);
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || exec.error) return;
  exec.error = emulator::refusal(exec.native_stream, body);
  if (exec.error) return;
  const emulator::Launch call{grid, kThreads, shared_bytes, [](const void* p, Thread& thread) {
                                (*static_cast<const Body*>(p))(thread);
                              }};
  emulator::enqueue_kernel(exec.native_stream, [call, body] { emulator::run(call, &body); });
}

}  // namespace tessera::kernels::cuda
