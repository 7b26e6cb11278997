// A thread of the emulated GPU; see kernels/cuda/gpu.hpp. For every compiler but nvcc.
//
// The threads of a block are fibers of one host thread and take turns; a turn ends at a barrier or
// a shuffle, and a barrier is passed when all live threads have come. Turns go forward and backward
// alternately, so that a result that hangs on their order shows. Shared memory is exactly as large
// as asked for and filled with NaN before each block.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>
#include <type_traits>

#include "kernels/cuda/grid.hpp"

#define TESSERA_DEVICE inline
#define TESSERA_UNROLL(n)

namespace tessera::kernels::cuda {

class EmulatedBlock;

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

  void run();  // the body, for the fiber

 private:
  std::byte* shared_memory();
  std::uint64_t exchange(std::uint64_t bits, int lane);

  EmulatedBlock* block_;
  int index_;
};

inline float to_float(BFloat16 x) { return x; }
inline float to_float(Float16 x) { return x; }
inline void from_float(float value, BFloat16& out) { out = BFloat16(value); }
inline void from_float(float value, Float16& out) { out = Float16(value); }

// What the GPU has and <cmath> lacks.
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline double sinpi(double x) { return std::sin(std::numbers::pi * x); }

inline void store_whole(void* to, const void* from) { std::memcpy(to, from, 16); }
inline float exp_fast(float x) { return std::exp(x); }
inline double exp_fast(double x) { return std::exp(x); }
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
