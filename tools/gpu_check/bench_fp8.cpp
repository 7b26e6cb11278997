// 8-bit floats: the kernels that make them, which wait for memory, and their products.
#include <algorithm>
#include <string>

#include "kernels/e4m3_rows.hpp"
#include "kernels/gemm_fp8.hpp"
#include "kernels/norm.hpp"
#include "tessera/base/error.hpp"
#include "tools/gpu_check/bench.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr std::int64_t kRows = 16384, kCols = 4096;
constexpr DType kDType = bf16;  // of what is rounded to 8 bits

// Of a scaled size, what codes can lie along in both directions.
std::int64_t sixteens(const Bench& b, std::int64_t size) {
  return std::max<std::int64_t>(16, b.scaled(size) / 16 * 16);
}

// A matrix of 8-bit floats with its scales, made of random values.
struct Codes {
  Codes(Bench& b, std::int64_t rows, std::int64_t cols, DType dtype, Scaling scaling)
      : at(b.array(dtype, rows * cols)),
        scales(b.array<float>(f32, scale_count(scaling, rows, cols))) {
    const void* const x = b.random_array(kDType, rows * cols);
    const auto pieces = static_cast<std::int32_t>(amax_pieces(rows * cols).count);
    auto* const most = b.array<float>(f32, pieces);
    b.prepare([&](Exec& e) {
      b.k().amax({.most = most, .x = x, .count = rows * cols, .dtype = kDType}, e);
      b.k().quantize({{.codes = at,
                       .transposed = nullptr,
                       .scales = scales,
                       .transposed_scales = nullptr,
                       .most = most,
                       .rows = rows,
                       .cols = cols,
                       .pieces = pieces,
                       .dtype = kDType,
                       .to = dtype,
                       .scaling = scaling},
                      x},
                     e);
    });
  }
  void* at;
  float* scales;
};

struct Product {
  const char* name;
  std::int64_t m, n, k;
  DType a, c;
  Scaling a_scaling, b_scaling;
  bool fast;
};

void measure(Bench& b, const Product& p) {
  const std::int64_t m = sixteens(b, p.m), n = sixteens(b, p.n), k = sixteens(b, p.k);
  const Codes x(b, m, k, p.a, p.a_scaling), y(b, n, k, e4m3, p.b_scaling);
  const GemmFp8Args args{.c = b.array(p.c, m * n),
                         .a = x.at,
                         .b = y.at,
                         .bias = nullptr,
                         .a_scales = x.scales,
                         .b_scales = y.scales,
                         .alpha = 1,
                         .beta = p.c == f32 ? 1. : 0.,
                         .m = static_cast<std::int32_t>(m),
                         .n = static_cast<std::int32_t>(n),
                         .k = static_cast<std::int32_t>(k),
                         .a_dtype = p.a,
                         .b_dtype = e4m3,
                         .c_dtype = p.c,
                         .a_scaling = p.a_scaling,
                         .b_scaling = p.b_scaling,
                         .fast = p.fast};
  b.measure_arithmetic(
      {{p.name,
        concat(p.a, " [", m, ", ", n, ", ", k, "]"),
        2. * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
        0,
        [&](Exec& e) { b.k().gemm_fp8(args, e); },
        {.kind = Products::Kind::matrix,
         .dtype = p.a,
         .batch = 1,
         .m = args.m,
         .n = args.n,
         .k = args.k}}});
}

}  // namespace

void measure_float8(Bench& b) {
  const std::int64_t rows = sixteens(b, kRows), n = rows * kCols;
  const auto bytes = static_cast<double>(n);
  const std::string shape = concat("bf16 [", rows, ", ", kCols, "]");
  const auto pieces = static_cast<std::int32_t>(amax_pieces(n).count);
  if (b.wanted("amax")) {
    void* const x = b.array(kDType, n);
    auto* const most = b.array<float>(f32, pieces);
    b.measure("amax", shape, 2 * bytes,
              [&](Exec& e) { b.k().amax({.most = most, .x = x, .count = n, .dtype = kDType}, e); });
  }
  // Into both forms, whatever is read for it.
  const auto both_forms = [&](Scaling scaling) {
    return Quantized{.codes = b.array(e4m3, n),
                     .transposed = b.array(e4m3, n),
                     .scales = b.array<float>(f32, scale_count(scaling, rows, kCols)),
                     .transposed_scales = b.array<float>(f32, scale_count(scaling, kCols, rows)),
                     .most = b.array<float>(f32, pieces),
                     .rows = rows,
                     .cols = kCols,
                     .pieces = pieces,
                     .dtype = kDType,
                     .to = e4m3,
                     .scaling = scaling};
  };
  const std::string what = concat(shape, ", and transposed");
  const auto quantize = [&](const char* name, Scaling scaling) {
    if (!b.wanted(name)) return;
    const QuantizeArgs args{both_forms(scaling), b.array(kDType, n)};
    b.measure(name, what, 4 * bytes, [&](Exec& e) { b.k().quantize(args, e); });
  };
  quantize("quantize", Scaling::tensor);
  quantize("quantize by rows", Scaling::rows);
  quantize("quantize by blocks", Scaling::blocks);
  if (b.wanted("rms_norm statistics")) {
    auto *const rstd = b.array<float>(f32, rows), *const most =
                                                      b.array<float>(f32, norm_magnitudes(rows));
    const RmsNormArgs args{.y = nullptr,
                           .rstd = rstd,
                           .x = b.array(kDType, n),
                           .weight = b.array(kDType, kCols),
                           .rows = rows,
                           .cols = kCols,
                           .eps = 1e-5,
                           .dtype = kDType,
                           .most = most};
    b.measure("rms_norm statistics", shape, 2 * bytes, [&](Exec& e) { b.k().rms_norm(args, e); });
  }
  const auto quantize_norm = [&](const char* name, Scaling scaling) {
    if (!b.wanted(name)) return;
    const QuantizeNormArgs args{.out = both_forms(scaling),
                                .input = b.array(kDType, n),
                                .weight = b.array(kDType, kCols),
                                .bias = nullptr,
                                .mean = nullptr,
                                .rstd = b.array<float>(f32, rows)};
    b.measure(name, what, 4 * bytes, [&](Exec& e) { b.k().quantize_norm(args, e); });
  };
  quantize_norm("quantize_norm", Scaling::tensor);
  quantize_norm("quantize_norm by rows", Scaling::rows);
  if (b.wanted("amax_swiglu")) {
    const AmaxSwigluArgs args{.most = b.array<float>(f32, pieces),
                              .gate = b.array(kDType, n),
                              .up = b.array(kDType, n),
                              .rows = rows,
                              .cols = kCols,
                              .gate_stride = kCols,
                              .up_stride = kCols,
                              .dtype = kDType};
    b.measure("amax_swiglu", shape, 4 * bytes, [&](Exec& e) { b.k().amax_swiglu(args, e); });
  }
  const auto quantize_swiglu = [&](const char* name, Scaling scaling) {
    if (!b.wanted(name)) return;
    const QuantizeSwigluArgs args{.out = both_forms(scaling),
                                  .gate = b.array(kDType, n),
                                  .up = b.array(kDType, n),
                                  .gate_stride = kCols,
                                  .up_stride = kCols};
    b.measure(name, what, 6 * bytes, [&](Exec& e) { b.k().quantize_swiglu(args, e); });
  };
  quantize_swiglu("quantize_swiglu", Scaling::tensor);
  quantize_swiglu("quantize_swiglu by rows", Scaling::rows);
  if (b.wanted("encode_e4m3")) {
    auto* const codes = b.array<Float8E4M3>(e4m3, n);
    auto *const scales = b.array<float>(f32, rows), *const in = b.array<float>(f32, n);
    b.measure("encode_e4m3", concat("of f32 [", rows, ", ", kCols, "]"), 5 * bytes, [&](Exec& e) {
      b.k().encode_e4m3({.codes = codes, .scales = scales, .in = in, .rows = rows, .cols = kCols},
                        e);
    });
  }
  if (b.wanted("decode_e4m3")) {
    const auto* const codes = b.array<Float8E4M3>(e4m3, n);
    const auto* const scales = b.array<float>(f32, rows);
    void* const out = b.array(kDType, n);
    b.measure("decode_e4m3", concat("to ", shape), 3 * bytes, [&](Exec& e) {
      b.k().decode_e4m3({.out = out,
                         .codes = codes,
                         .scales = scales,
                         .rows = rows,
                         .cols = kCols,
                         .dtype = kDType},
                        e);
    });
  }
}

// As linear_fp8 calls them: forward, and to the weight, whose gradient is added up in f32.
void measure_fp8_products(Bench& b) {
  if (!b.named("fp8_products")) return;
  constexpr auto kWhole = Scaling::tensor, kOfRows = Scaling::rows, kOfBlocks = Scaling::blocks;
  struct Layer {
    std::int64_t tokens, in, out;
  };
  for (const Layer l :
       {Layer{8192, 768, 3072}, {8192, 2048, 8192}, {8192, 4096, 14336}, {16384, 4096, 4096}}) {
    measure(b, {"fp8 forward", l.tokens, l.out, l.in, e4m3, bf16, kWhole, kWhole, true});
    measure(b, {"fp8 to the weight", l.out, l.in, l.tokens, e5m2, f32, kWhole, kWhole, false});
    measure(
        b, {"fp8 forward, by blocks", l.tokens, l.out, l.in, e4m3, bf16, kOfRows, kOfBlocks, true});
    measure(b, {"fp8 to the weight, by rows", l.out, l.in, l.tokens, e4m3, f32, kOfRows, kOfRows,
                false});
  }
}

}  // namespace tessera::gpu_check
