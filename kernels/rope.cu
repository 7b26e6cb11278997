// Rotary positions: a thread turns one pack of a head's lower half and the pack of the upper half
// that belongs to it. A block takes whole tokens, so that positions are found with 32-bit
// arithmetic.
#include "kernels/rope.hpp"

#include <algorithm>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 2 * kThreads;  // of a block, at least

template <int N>
TESSERA_DEVICE Pack<float, N> table_pack(const float* from) {
  Pack<float, N> out;
  if constexpr (N >= 4) {
    for (int i = 0; i < N; i += 4) {
      const auto part = load<4>(from + i);
      for (int e = 0; e < 4; ++e) out.at[i + e] = part.at[e];
    }
  } else {
    for (int i = 0; i < N; ++i) out.at[i] = from[i];
  }
  return out;
}

// N elements a time: kPack, or 1 where addresses or sizes do not allow it.
template <class T, int N>
struct Rotate {
  RopeArgs a;
  unsigned tokens, per_head, per_token;  // of a block; items of a head and of a token

  TESSERA_DEVICE void operator()(Thread& t) const {
    using C = Compute<T>;
    const std::int64_t first = t.block() * tokens, all = std::int64_t{a.batch} * a.length;
    const int half = a.head_dim / 2;
    for (unsigned e = static_cast<unsigned>(t.index()); e < tokens * per_token; e += kThreads) {
      const unsigned local = e / per_token, rest = e % per_token, h = rest / per_head;
      const int i = static_cast<int>(rest % per_head) * N;
      if (first + local >= all) return;
      const auto token = static_cast<std::uint64_t>(first + local);
      const auto length = static_cast<unsigned>(a.length);
      const std::int64_t b = token <= 0xffffffffu ? static_cast<unsigned>(token) / length
                                                  : static_cast<std::int64_t>(token / length),
                         at = static_cast<std::int64_t>(token) - b * a.length;
      const T* x = static_cast<const T*>(a.x) + b * a.x_strides[0] + at * a.x_strides[1] +
                   h * a.x_strides[2] + i;
      T* y =
          static_cast<T*>(a.y) + b * a.y_strides[0] + at * a.y_strides[1] + h * a.y_strides[2] + i;
      const std::int64_t angle = (at + a.position) * half + i;
      const auto cos = table_pack<N>(a.cos + angle), sin = table_pack<N>(a.sin + angle);
      auto low = load<N>(x), high = load<N>(x + half);
      for (int k = 0; k < N; ++k) {
        const C c = cos.at[k], s = a.inverse ? -sin.at[k] : sin.at[k];
        const C l = load_as_compute(low.at[k]), u = load_as_compute(high.at[k]);
        low.at[k] = rounded<T>(l * c - u * s);
        high.at[k] = rounded<T>(u * c + l * s);
      }
      store(y, low);
      store(y + half, high);
    }
  }
};

template <class T, int N>
void rotate(const RopeArgs& a, Exec& exec) {
  const auto per_head = static_cast<unsigned>(a.head_dim / 2 / N), per_token = a.heads * per_head;
  if (per_token == 0) return;
  const unsigned tokens = std::max(1u, kItems / per_token);
  launch<kThreads>(exec, {blocks_for(std::int64_t{a.batch} * a.length, tokens)}, 0,
                   Rotate<T, N>{a, tokens, per_head, per_token});
}

struct FillTable {
  RopeTableArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t half = a.head_dim / 2, e = t.global_index();
    if (e >= a.positions * half) return;
    const std::int64_t p = e / half, i = e - p * half;
    const double frequency =
        pow(a.theta, -2.0 * static_cast<double>(i) / static_cast<double>(a.head_dim));
    const double angle = static_cast<double>(p) * frequency;
    a.cos[e] = static_cast<float>(cos(angle));
    a.sin[e] = static_cast<float>(sin(angle));
  }
};

}  // namespace

void rope(const RopeArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_integral_v<T>) {
      constexpr int n = kPack<T>;
      bool whole = a.head_dim / 2 % n == 0 && are_aligned(static_cast<const char*>(a.x),
                                                          static_cast<char*>(a.y), a.cos, a.sin);
      for (int d = 0; d < 3; ++d)
        whole = whole && a.x_strides[d] % n == 0 && a.y_strides[d] % n == 0;
      whole ? rotate<T, n>(a, exec) : rotate<T, 1>(a, exec);
    }
  });
}

void rope_table(const RopeTableArgs& a, Exec& exec) {
  launch<kThreads>(exec, {blocks_for(a.positions * (a.head_dim / 2), kThreads)}, 0, FillTable{a});
}

}  // namespace tessera::kernels::cuda
