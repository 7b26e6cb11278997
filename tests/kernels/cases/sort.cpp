// The order of rows of any length, with equal elements and NaN.
#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {

TESSERA_CASE("sort", "rows of any length, both directions; NaN is largest, equal ones keep order") {
  for (const DType dtype : kAll)
    for (const bool descending : {false, true})
      for (const auto& [rows, cols, shifted] : {std::tuple{1, 1, false},
                                                {5, 2, false},
                                                {3, 7, true},
                                                {2, 64, false},
                                                {2, 257, false},
                                                {1, 1500, true},
                                                {0, 4, false},
                                                {3, 0, false}}) {
        Operand &in = c.input(dtype, rows * cols, -9, 9, shift_of(dtype, shifted)),
                &order = c.output(i64, rows * cols);
        if (is_floating(dtype))
          for (std::int64_t i = 0; i < in.size(); ++i)
            in.set(i, c.integer(0, 30) == 0 ? std::numeric_limits<double>::quiet_NaN()
                                            : std::round(2 * in.get(i)) / 2);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.sort({.order = order.at<std::int64_t>(side),
                  .in = in.at(side),
                  .rows = rows,
                  .cols = cols,
                  .dtype = dtype,
                  .descending = descending},
                 exec);
        });
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto rank = [&](std::int64_t i) {
            const double x = in.get(row * cols + i);
            return (descending ? -1 : 1) *
                   (std::isnan(x) ? std::numeric_limits<double>::infinity() : x);
          };
          std::vector<std::int64_t> expected(static_cast<std::size_t>(cols));
          std::iota(expected.begin(), expected.end(), 0);
          std::stable_sort(expected.begin(), expected.end(),
                           [&](std::int64_t i, std::int64_t j) { return rank(i) < rank(j); });
          for (std::int64_t k = 0; k < cols; ++k)
            c.near(order, row * cols + k,
                   static_cast<double>(expected[static_cast<std::size_t>(k)]), 0);
        }
        c.next();
      }
}

}  // namespace kernel_test
