// A thread of the emulated GPU, with its warpgroup; functions of numbers, and launches; see
// kernels/cuda/gpu.hpp. For every compiler but nvcc.
#pragma once

#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <numbers>
#include <type_traits>
#include <utility>

#include "tests/emulator/warp.hpp"
// needs TESSERA_DEVICE
#include "kernels/cuda/swizzle.hpp"

#define TESSERA_HAS_WARPGROUPS

namespace tessera::kernels::cuda {

class Thread : public WarpThread {
 public:
  using WarpThread::WarpThread;

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
    queue({&Thread::compute<T>, d, std::to_array(a), {}, b, true, true});
  }
  template <class T>
  void multiply_columns(float (&d)[8][4], Matrix a, Matrix b, bool adds = true) {
    queue({&Thread::compute<T>, d, {}, a, b, false, adds});
  }
  void fence_products() { is_fenced_ = true; }
  void commit_products() { groups_.push_back(std::exchange(products_, {})); }
  // Says so where a sum that comes is none of `d`: nobody would have kept the compiler from it.
  template <int kLeft, class... D>
  void wait_products(D&... d) {
    is_fenced_ = false;
    for (; groups_.size() > kLeft; groups_.pop_front())
      for (const Product& product : groups_.front()) {
        const auto* const sums = reinterpret_cast<const std::byte*>(product.d);
        const auto has = [&](const auto& of) {
          const auto* const begin = reinterpret_cast<const std::byte*>(&of);
          return sums >= begin && sums < begin + sizeof of;
        };
        expect((has(d) || ...), "a product has come whose sums nobody waits for");
        (this->*product.compute)(product);
      }
  }
  void wait_copies_for_products() { wait_copies(); }

  void run();  // the body, for the fiber

 private:
  struct Product {
    void (Thread::*compute)(const Product& own);
    float (*d)[4];
    std::array<std::uint32_t, 4> a;  // where `left` is nowhere
    Matrix left, right;
    bool by_rows, adds;  // right by its rows, or its columns; to d, or in its place
  };
  void queue(const Product& product) {
    expect(is_fenced_, "a product without fence_products() since the last wait");
    products_.push_back(product);
  }
  // One lane for the whole warp, whose operands are converted once.
  template <class T>
  void compute(const Product& own) {
    const std::uint64_t* const all = show(reinterpret_cast<std::uintptr_t>(&own));
    const auto of = [&](int row, int pair) {  // the lane that has this row and pair of columns
      return reinterpret_cast<const Product*>(all[row % 8 * 4 + pair]);
    };
    const auto element = [&](int r, int k) {  // of a
      if (own.left.data) return own.left.at<T>(warp() % 4 * 16 + r, k / 8 * 8)[k % 8];
      const std::uint32_t bits = of(r, k % 8 / 2)->a[r / 8 + k / 8 * 2] >> 16 * (k % 2);
      return std::bit_cast<T>(static_cast<std::uint16_t>(bits));
    };
    const auto sum_of = [&](int r, int n) -> float& {
      return of(r, n % 8 / 2)->d[n / 8][r / 8 * 2 + n % 2];
    };
    if (lane() == 0) {
      float y[16][64], sums[64];
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 64; ++n)
          y[k][n] = to_float(own.by_rows ? own.right.at<T>(k, n / 8 * 8)[n % 8]
                                         : own.right.at<T>(n, k / 8 * 8)[k % 8]);
      for (int r = 0; r < 16; ++r) {
        for (int n = 0; n < 64; ++n) sums[n] = own.adds ? sum_of(r, n) : 0;
        for (int k = 0; k < 16; ++k) {
          const float x = to_float(element(r, k));
          for (int n = 0; n < 64; ++n) sums[n] += x * y[k][n];
        }
        for (int n = 0; n < 64; ++n) sum_of(r, n) = sums[n];
      }
    }
    sync_warp();
  }
  // Ends the process with a line where this is not so.
  static void expect(bool holds, const char* otherwise);

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
