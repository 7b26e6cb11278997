// Rows as e4m3 with a scale each, a block a row.
#include "kernels/e4m3_rows.hpp"

#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// A NaN is no larger than anything.
struct Larger {
  TESSERA_DEVICE float operator()(float a, float b) const { return b > a ? b : a; }
};

template <int N>
struct Encode {
  EncodeE4m3Args a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t at = t.block() * a.cols;
    float most = 0;
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads) {
      const auto pack = load<N>(a.in + at + i);
      for (int j = 0; j < N; ++j) most = Larger{}(most, std::abs(pack.at[j]));
    }
    most = group_reduce(t, Group(t, kThreads), most, t.shared<float>(), Larger{});
    const float scale = float8_scale<Float8E4M3>(most), factor = 1 / scale;
    if (t.index() == 0) a.scales[t.block()] = scale;
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads) {
      const auto pack = load<N>(a.in + at + i);
      Pack<Float8E4M3, N> codes;
      for (int j = 0; j < N; ++j) codes.at[j] = Float8E4M3(pack.at[j] * factor);
      store(a.codes + at + i, codes);
    }
  }
};

template <class T, int N>
struct Decode {
  DecodeE4m3Args a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t at = t.block() * a.cols;
    const float scale = a.scales[t.block()];
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads) {
      const auto codes = load<N>(a.codes + at + i);
      Pack<T, N> out;
      for (int j = 0; j < N; ++j) out.at[j] = rounded<T>(load_as_compute(codes.at[j]) * scale);
      store(static_cast<T*>(a.out) + at + i, out);
    }
  }
};

}  // namespace

void encode_e4m3(const EncodeE4m3Args& a, Exec& exec) {
  const auto queue = [&](auto pack) {
    launch<kThreads>(exec, {a.rows}, kWarps * sizeof(float), Encode<decltype(pack)::value>{a});
  };
  if (a.cols % 4 == 0 && are_aligned(a.in, a.codes))
    queue(std::integral_constant<int, 4>{});
  else
    queue(std::integral_constant<int, 1>{});
}

void decode_e4m3(const DecodeE4m3Args& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int n = kPack<T>;
    if (a.cols % n == 0 && are_aligned(static_cast<const T*>(a.out), a.codes))
      launch<kThreads>(exec, {a.rows}, 0, Decode<T, n>{a});
    else
      launch<kThreads>(exec, {a.rows}, 0, Decode<T, 1>{a});
  });
}

}  // namespace tessera::kernels::cuda
