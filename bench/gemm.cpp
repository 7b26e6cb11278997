// How close do our f32 matrix products come to one core's peak?
//
//   bench-gemm [M K N]      default 1024 768 3072
//
// Each sample is paired with the peak of fused multiply-adds read just before it in the same
// process, so that a core that changes its clock, or has neighbours, changes both halves of a
// ratio. The closing line is the slowest orientation.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/kernel_table.hpp"

namespace {

using namespace tessera;

constexpr int kSamples = 20;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Twelve independent chains hide the latency of two units with up to six cycles each; eight lanes,
// two operations.
[[gnu::target("avx2,fma"), gnu::noinline]] double peak_reading() {
  constexpr long rounds = 400'000;
  const __m256 x = _mm256_set1_ps(0.9999f), y = _mm256_set1_ps(1e-3f);
  __m256 a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
  const double start = seconds();
  for (long round = 0; round < rounds; ++round) {
    a = _mm256_fmadd_ps(a, x, y), b = _mm256_fmadd_ps(b, x, y), c = _mm256_fmadd_ps(c, x, y);
    d = _mm256_fmadd_ps(d, x, y), e = _mm256_fmadd_ps(e, x, y), f = _mm256_fmadd_ps(f, x, y);
    g = _mm256_fmadd_ps(g, x, y), h = _mm256_fmadd_ps(h, x, y), i = _mm256_fmadd_ps(i, x, y);
    j = _mm256_fmadd_ps(j, x, y), k = _mm256_fmadd_ps(k, x, y), l = _mm256_fmadd_ps(l, x, y);
    // Tells the compiler that every chain is needed as it is: none is folded, merged or dropped.
    asm volatile("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f));
    asm volatile("" : "+x"(g), "+x"(h), "+x"(i), "+x"(j), "+x"(k), "+x"(l));
  }
  return rounds * 12.0 * 8 * 2 / (seconds() - start) * 1e-9;
}

// A reading takes under a millisecond; the best of several is the peak even where another process
// interrupts one.
double peak_gflops() {
  double best = 0;
  for (int reading = 0; reading < 8; ++reading) best = std::max(best, peak_reading());
  return best;
}

struct Orientation {
  const char* name;
  bool trans_a, trans_b;
};

struct Result {
  double best_gflops, best, median;  // ratios to the peak
};

Result measure(const Orientation& o, std::int32_t m, std::int32_t k, std::int32_t n) {
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-1, 1);
  const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    for (float& value : values) value = uniform(random);
    return values;
  };
  const std::vector<float> a = matrix(m, k), b = matrix(k, n);
  std::vector<float> c = matrix(m, n);
  const kernels::GemmArgs args{.c = c.data(),
                               .a = a.data(),
                               .b = b.data(),
                               .bias = nullptr,
                               .alpha = 1,
                               .beta = 0,
                               .a_batch_stride = 0,
                               .b_batch_stride = 0,
                               .c_batch_stride = 0,
                               .batch = 1,
                               .m = m,
                               .n = n,
                               .k = k,
                               .lda = o.trans_a ? m : k,
                               .ldb = o.trans_b ? k : n,
                               .ldc = n,
                               .dtype = DType::f32,
                               .c_dtype = DType::f32,
                               .trans_a = o.trans_a,
                               .trans_b = o.trans_b};
  Exec exec;
  const double flops = 2.0 * m * k * n;
  const int repeats =
      std::max(1, static_cast<int>(2e8 / flops));  // at least some milliseconds a sample
  kernels::cpu_kernels().gemm(args, exec);         // touches all memory once
  Result result{};
  std::vector<double> ratios;
  for (int sample = 0; sample < kSamples; ++sample) {
    const double peak = peak_gflops(), start = seconds();
    for (int i = 0; i < repeats; ++i) kernels::cpu_kernels().gemm(args, exec);
    const double gflops = repeats * flops / (seconds() - start) * 1e-9;
    ratios.push_back(gflops / peak);
    result.best_gflops = std::max(result.best_gflops, gflops);
  }
  std::sort(ratios.begin(), ratios.end());
  result.best = ratios.back();
  result.median = (ratios[kSamples / 2 - 1] + ratios[kSamples / 2]) / 2;
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::fprintf(stderr,
                 "bench-gemm: this processor has no AVX2 and FMA, which the peak is read with\n");
    return 1;
  }
  const auto size = [&](int i, std::int32_t fallback) {
    return argc > i ? std::atoi(argv[i]) : fallback;
  };
  const std::int32_t m = size(1, 1024), k = size(2, 768), n = size(3, 3072);
  if (m <= 0 || k <= 0 || n <= 0) {
    std::fprintf(stderr, "bench-gemm: sizes must be positive; usage: bench-gemm [M K N]\n");
    return 2;
  }
  std::printf("f32, %d x %d by %d x %d, one thread, %d samples, each beside its own peak\n", m, k,
              k, n, kSamples);
  std::printf("%-26s %14s %14s %16s\n", "product", "best GFLOP/s", "best of peak",
              "median of peak");
  Result worst{1e30, 1e30, 1e30};
  for (const Orientation& o : {Orientation{"A B", false, false},
                               {"A B^T  (x W^T)", false, true},
                               {"A^T B  (dy^T x)", true, false}}) {
    const Result r = measure(o, m, k, n);
    std::printf("%-26s %14.1f %13.1f%% %15.1f%%\n", o.name, r.best_gflops, 100 * r.best,
                100 * r.median);
    if (r.best < worst.best) worst = r;
  }
  std::printf("ratio to the FMA peak: best %.3f, median %.3f\n", worst.best, worst.median);
  return 0;
}
