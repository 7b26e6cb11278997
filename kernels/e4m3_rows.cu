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

// N elements at a time, which lie in several packs; their codes are one.
template <int N>
struct Encode {
  EncodeE4m3Args a;
  static constexpr int kOfPack = N > 1 ? kPack<float> : 1;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t at = t.block() * a.cols;
    float most = 0;
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads)
      unrolled<N / kOfPack>([&](int p) {
        const auto pack = load<kOfPack>(a.in + at + i + p * kOfPack);
        for (int j = 0; j < kOfPack; ++j) most = Larger{}(most, std::abs(pack.at[j]));
      });
    most = group_reduce(t, Group(t, kThreads), most, t.shared<float>(), Larger{});
    const float scale = float8_scale<Float8E4M3>(most), factor = 1 / scale;
    if (t.index() == 0) a.scales[t.block()] = scale;
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads) {
      Pack<Float8E4M3, N> codes;
      unrolled<N / kOfPack>([&](int p) {
        const auto pack = load<kOfPack>(a.in + at + i + p * kOfPack);
        for (int j = 0; j < kOfPack; ++j)
          codes.at[p * kOfPack + j] = Float8E4M3(pack.at[j] * factor);
      });
      store(a.codes + at + i, codes);
    }
  }
};

// N codes at a time, which fill several packs.
template <class T, int N>
struct Decode {
  DecodeE4m3Args a;
  static constexpr int kOfPack = N > 1 ? kPack<T> : 1;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t at = t.block() * a.cols;
    const float scale = a.scales[t.block()];
    for (std::int64_t i = N * t.index(); i < a.cols; i += N * kThreads) {
      const auto codes = load<N>(a.codes + at + i);
      unrolled<N / kOfPack>([&](int p) {
        Pack<T, kOfPack> out;
        for (int j = 0; j < kOfPack; ++j)
          out.at[j] = rounded<T>(load_as_compute(codes.at[p * kOfPack + j]) * scale);
        store(static_cast<T*>(a.out) + at + i + p * kOfPack, out);
      });
    }
  }
};

}  // namespace

void encode_e4m3(const EncodeE4m3Args& a, Exec& exec) {
  const auto queue = [&](auto pack) {
    launch<kThreads>(exec, {a.rows}, kWarps * sizeof(float), Encode<decltype(pack)::value>{a});
  };
  constexpr int n = kPack<Float8E4M3>;
  if (a.cols % n == 0 && are_aligned(a.in, a.codes))
    queue(std::integral_constant<int, n>{});
  else
    queue(std::integral_constant<int, 1>{});
}

void decode_e4m3(const DecodeE4m3Args& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int n = kPack<Float8E4M3>;
    if (a.cols % n == 0 && are_aligned(static_cast<const T*>(a.out), a.codes))
      launch<kThreads>(exec, {a.rows}, 0, Decode<T, n>{a});
    else
      launch<kThreads>(exec, {a.rows}, 0, Decode<T, 1>{a});
  });
}

}  // namespace tessera::kernels::cuda
