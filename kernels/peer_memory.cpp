#include "kernels/peer_memory.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/host/cpu.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels {

using namespace host;

namespace {

// Four vectors at a time: the sums stay in registers while the inputs stream through.
template <class T>
void add_floats(T* out, const void* const* inputs, int n_inputs, std::int64_t count) {
  using C = Compute<T>;
  constexpr std::int64_t step = kLanes<C>;
  const auto input = [&](int p) { return static_cast<const T*>(inputs[p]); };
  std::int64_t i = 0;
  for (; i + 4 * step <= count; i += 4 * step) {
    Vec<C> a0 = load(input(0) + i), a1 = load(input(0) + i + step);
    Vec<C> a2 = load(input(0) + i + 2 * step), a3 = load(input(0) + i + 3 * step);
    for (int p = 1; p < n_inputs; ++p) {
      const T* in = input(p) + i;
      a0 += load(in);
      a1 += load(in + step);
      a2 += load(in + 2 * step);
      a3 += load(in + 3 * step);
    }
    store(out + i, a0);
    store(out + i + step, a1);
    store(out + i + 2 * step, a2);
    store(out + i + 3 * step, a3);
  }
  for_lanes<C>(count - i, [&](std::int64_t j, auto io) {
    Vec<C> sum = io.load(input(0) + i + j);
    for (int p = 1; p < n_inputs; ++p) sum += io.load(input(p) + i + j);
    io.store(out + i + j, sum);
  });
}

template <class T>
void add_integers(T* out, const void* const* inputs, int n_inputs, std::int64_t count) {
  using Sum = std::conditional_t<
      std::is_same_v<T, bool>, std::uint8_t,
      std::make_unsigned_t<std::conditional_t<std::is_same_v<T, bool>, std::int8_t, T>>>;
  constexpr std::int64_t block = 256;
  for (std::int64_t first = 0; first < count; first += block) {
    const std::int64_t n = std::min(block, count - first);
    Sum sums[block] = {};
    for (int p = 0; p < n_inputs; ++p) {
      const T* in = static_cast<const T*>(inputs[p]) + first;
      if constexpr (std::is_same_v<T, bool>) {
        for (std::int64_t i = 0; i < n; ++i) sums[i] |= static_cast<Sum>(in[i]);
      } else {
        for (std::int64_t i = 0; i < n; ++i) sums[i] += static_cast<Sum>(in[i]);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) out[first + i] = static_cast<T>(sums[i]);
  }
}

}  // namespace

void reduce_peers(void* out, const void* const* inputs, int n_inputs, std::int64_t count,
                  DType dtype) {
  if (count == 0) return;
  if (n_inputs == 0) {
    std::memset(out, 0, static_cast<std::size_t>(count) * size_bytes(dtype));
    return;
  }
  visit_computed(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T>)
      add_integers(static_cast<T*>(out), inputs, n_inputs, count);
    else
      add_floats(static_cast<T*>(out), inputs, n_inputs, count);
  });
}

void max_peers(void* out, const void* const* inputs, int n_inputs, std::int64_t count,
               DType dtype) {
  visit_computed(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto input = [&](int p) { return static_cast<const T*>(inputs[p]); };
    for (std::int64_t i = 0; i < count; ++i) {
      T most = input(0)[i];
      for (int p = 1; p < n_inputs; ++p) {
        const T x = input(p)[i];
        if (x > most || !(x == x)) most = x;  // a NaN is kept: nothing compares greater
      }
      static_cast<T*>(out)[i] = most;
    }
  });
}

void copy_bytes(void* out, const void* in, std::size_t size_bytes) {
  if (out != in && size_bytes != 0) std::memcpy(out, in, size_bytes);
}

namespace cpu {

void reduce_peers(const PeersArgs& args, Exec&) {
  const auto f = args.op == PeersOp::max ? kernels::max_peers : kernels::reduce_peers;
  f(args.out, args.inputs, args.n_inputs, args.count, args.dtype);
}

void copy(const CopyArgs& args, Exec&) {
  copy_bytes(args.out, args.in, static_cast<std::size_t>(args.bytes));
}

void copies(const CopiesArgs& args, Exec& exec) {
  for (std::int32_t i = 0; i < args.count; ++i) copy(args.copies[i], exec);
}

}  // namespace cpu

}  // namespace tessera::kernels
