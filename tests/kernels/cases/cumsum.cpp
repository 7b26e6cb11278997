// Running sums in both directions: integers exact, floats as a sum in double precision.
#include "tests/kernels/bounded.hpp"

namespace kernel_test {

TESSERA_CASE("cumsum", "columns of any length, both directions, every dtype") {
  struct Sizes {
    std::int64_t outer, n, inner;
    bool shifted = false;
  };
  for (const DType dtype : kAll)
    for (const bool reversed : {false, true})
      for (const Sizes& s : {Sizes{1, 1, 1},
                             {3, 7, 1},
                             {2, 1031, 1},
                             {2, 256, 3},
                             {1, 300, 5, true},
                             {0, 4, 2},
                             {2, 0, 3},
                             {2, 3, 0}}) {
        const bool real = is_floating(dtype);
        Operand &in = c.input(dtype, s.outer * s.n * s.inner, real ? -2 : -1000, real ? 2 : 1000,
                              shift_of(dtype, s.shifted)),
                &out = c.output(real ? dtype : i64, s.outer * s.n * s.inner);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.cumsum({.out = out.at(side),
                    .in = in.at(side),
                    .outer = s.outer,
                    .n = s.n,
                    .inner = s.inner,
                    .dtype = dtype,
                    .reversed = reversed},
                   exec);
        });
        for (std::int64_t column = 0; column < s.outer * s.inner; ++column) {
          BoundedSum<double> sum;  // any order of f64 sums, then one rounding
          for (std::int64_t k = 0; k < s.n; ++k) {
            const std::int64_t at = column / s.inner * s.n * s.inner + column % s.inner +
                                    (reversed ? s.n - 1 - k : k) * s.inner;
            sum.add(Bounded<double>::given(in.get(at)));
            const Bounded<double> total = sum.get();
            if (!real)
              c.near(out, at, total.v, 0);
            else
              c.near(out, at, total.v, stored_error(dtype, total));
          }
        }
        c.next();
      }
}

}  // namespace kernel_test
