// Products of 8-bit floats: codes become numbers, times their scales, while slivers of both
// operands are packed for the register kernel; powers of two, so that this rounds nothing. Cut by
// shape alone.
#include "kernels/gemm_fp8.hpp"

#include <array>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/scratch.hpp"
#include "kernels/host/tile.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

constexpr std::int64_t kFp8Rows = 16 * kTileRowsAtOnce,
                       kFp8Cols = 16 * kTileStep<float>;  // of a task
constexpr std::int64_t kFp8Depth = 3 * kScaledBlock;      // packed at a time

template <class Code>
constexpr std::array<float, 256> kValuesOfCodes = [] {
  std::array<float, 256> values{};
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::bit_cast<Code>(static_cast<std::uint8_t>(i));
  return values;
}();

// One of the operands, [rows, k].
struct Fp8Factor {
  const void* codes;
  const float* scales;
  DType dtype;
  Scaling scaling;
  std::int64_t rows, k;
};

// Packs slivers of `Width` of the rows from `row` on, of which there are `count`, and the columns
// from `col` on: out[sliver][l][i]. What is beyond the rows is 0.
template <std::int64_t Width>
void pack_codes(float* out, const Fp8Factor& f, std::int64_t row, std::int64_t count,
                std::int64_t col, std::int64_t depth) {
  const std::int64_t stride = scale_stride(f.scaling, f.rows, f.k);
  const float* const values = f.dtype == DType::e4m3 ? kValuesOfCodes<Float8E4M3>.data()
                                                     : kValuesOfCodes<Float8E5M2>.data();
  for (std::int64_t first = 0; first < count; first += Width, out += Width * depth)
    for (std::int64_t i = 0; i < Width; ++i) {
      const std::int64_t at = row + first + i;
      const auto* const codes = static_cast<const std::uint8_t*>(f.codes) + at * f.k + col;
      for (std::int64_t begin = 0; begin < depth; begin += kScaledBlock) {
        const std::int64_t end = std::min(depth, begin + kScaledBlock);
        if (first + i >= count) {
          for (std::int64_t l = begin; l < end; ++l) out[l * Width + i] = 0;
          continue;
        }
        const float scale = f.scales[scale_index(f.scaling, stride, at, col + begin)];
        for (std::int64_t l = begin; l < end; ++l) out[l * Width + i] = values[codes[l]] * scale;
      }
    }
}

struct PackedFp8 {
  alignas(64) float a[kFp8Rows * kFp8Depth];
  alignas(64) float b[kFp8Cols * kFp8Depth];
  alignas(64) float sums[kFp8Rows * kFp8Cols];
};

template <class C>
void fp8_task(const GemmFp8Args& args, std::int64_t row, std::int64_t col) {
  const Fp8Factor a{args.a, args.a_scales, args.a_dtype, args.a_scaling, args.m, args.k},
      b{args.b, args.b_scales, args.b_dtype, args.b_scaling, args.n, args.k};
  const std::int64_t rows = std::min<std::int64_t>(kFp8Rows, args.m - row),
                     cols = std::min<std::int64_t>(kFp8Cols, args.n - col);
  auto& [a_block, b_block, sums] = in_scratch<PackedFp8>();
  std::fill(std::begin(sums), std::end(sums), 0.0f);
  for (std::int64_t l = 0; l < args.k; l += kFp8Depth) {
    const std::int64_t depth = std::min<std::int64_t>(kFp8Depth, args.k - l);
    pack_codes<kTileRowsAtOnce>(a_block, a, row, rows, l, depth);
    pack_codes<kTileStep<float>>(b_block, b, col, cols, l, depth);
    for (std::int64_t j = 0; j < cols; j += kTileStep<float>)
      for (std::int64_t i = 0; i < rows; i += kTileRowsAtOnce)
        tile_block<kTileRowsAtOnce, float>(sums + i * kFp8Cols + j, kFp8Cols,
                                           {a_block + i * depth, 1, kTileRowsAtOnce},
                                           {b_block + j * depth, kTileStep<float>}, depth, true);
  }
  const auto alpha = static_cast<float>(args.alpha), beta = static_cast<float>(args.beta);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) {
      C& c = static_cast<C*>(args.c)[(row + i) * args.n + col + j];
      float value = alpha * sums[i * kFp8Cols + j];
      if (args.bias) value += static_cast<float>(static_cast<const C*>(args.bias)[col + j]);
      if (beta != 0) value += beta * static_cast<float>(c);
      c = C(value);
    }
}

}  // namespace

void gemm_fp8(const GemmFp8Args& args, Exec& exec) {
  const std::int64_t across = (args.n + kFp8Cols - 1) / kFp8Cols;
  visit_floating(args.c_dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    if constexpr (sizeof(C) <= sizeof(float))
      parallel_for(exec, (args.m + kFp8Rows - 1) / kFp8Rows * across, [&](std::int64_t i) {
        fp8_task<C>(args, i / across * kFp8Rows, i % across * kFp8Cols);
      });
  });
}

}  // namespace tessera::kernels::cpu
