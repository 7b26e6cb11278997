// Rows in e4m3 with a scale each: a bound on what comes back, and exactly what the contract says.
#include <cmath>
#include <cstring>

#include "kernels/e4m3_rows.hpp"
#include "tests/kernels/case.hpp"

namespace kernel_test {

TESSERA_CASE("e4m3_rows", "rows of any length and size come back within a rounding to e4m3") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const std::int64_t cols : {std::int64_t{1}, std::int64_t{64}, std::int64_t{61},
                                    c.integer(250, 1100), 16 * c.integer(250, 300)}) {
      constexpr std::int64_t rows = 7;
      Operand &x = c.input(f32, rows * cols, -3, 3), &codes = c.output(e4m3, rows * cols),
              &scales = c.output(f32, rows), &y = c.output(dtype, rows * cols);
      // Rows of zeros, of large and of tiny ones, of subnormals, with a NaN and with an infinity.
      const double sizes[rows] = {1, 0, 0x1p100, 0x1p-100, 0x1p-140, 1, 1};
      for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, x.get(i) * sizes[i / cols]);
      x.set(5 * cols, NAN);
      x.set(6 * cols + cols / 2, INFINITY);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.encode_e4m3({.codes = codes.at<Float8E4M3>(side),
                       .scales = scales.at<float>(side),
                       .in = x.at<float>(side),
                       .rows = rows,
                       .cols = cols},
                      exec);
        k.decode_e4m3({.out = y.at(side),
                       .codes = codes.at<Float8E4M3>(side),
                       .scales = scales.at<float>(side),
                       .rows = rows,
                       .cols = cols,
                       .dtype = dtype},
                      exec);
      });
      for (std::int64_t row = 0; row < rows; ++row) {
        double most = 0;
        for (std::int64_t i = row * cols; i < (row + 1) * cols; ++i)
          if (std::abs(x.get(i)) > most) most = std::abs(x.get(i));
        // The least power of two of which 448 hold the largest.
        double scale = 0x1p-126;
        while (448 * scale < most && std::isfinite(most)) scale *= 2;
        if (std::isinf(most)) scale = NAN;
        c.near(scales, row, scale, 0);
        for (std::int64_t i = row * cols; i < (row + 1) * cols; ++i) {
          const double value = x.get(i);
          if (std::isnan(scale) || std::isnan(value)) {
            c.near(y, i, NAN, 0);
            continue;
          }
          c.near(codes, i, rounded_to(e4m3, value / scale), 0);
          const double decoded = c.on_device(codes, i) * scale;
          c.near(y, i, rounded_to(dtype, decoded), 0);
          if (dtype != f16)  // which does not reach so far
            c.near(y, i, value, std::max(0x1p-4 * std::abs(value), 0x1p-10 * scale));
        }
      }
      c.next();
    }
}

}  // namespace kernel_test
