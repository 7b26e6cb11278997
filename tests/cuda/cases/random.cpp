#include "tests/cuda/case.hpp"

namespace cuda_test {

TESSERA_CASE("random", "any range of the whole parameter") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const std::int64_t n : {1, 5, 1031}) {
      const auto key = static_cast<std::uint64_t>(c.integer(0, INT64_MAX));
      const std::int64_t begin = c.integer(0, 1LL << 36);
      const auto shift = static_cast<std::int64_t>(size_bytes(dtype));
      Operand &normal = c.output(dtype, n), &uniform = c.output(dtype, n, shift);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.normal({.out = normal.at(side),
                  .key = key,
                  .begin = begin,
                  .count = n,
                  .mean = 0.25,
                  .std = 0.5,
                  .dtype = dtype},
                 exec);
        k.uniform({.out = uniform.at(side),
                   .key = key,
                   .begin = begin,
                   .count = n,
                   .low = -0.3,
                   .high = 0.7,
                   .dtype = dtype},
                  exec);
      });
      c.equal(uniform);
      // In f64 log is within 1 unit, cos and sin are within 2 (CUDA programming guide), and the
      // host's within 1; |std sqrt(-2 ln u)| <= 0.5 * 9.5, of ten roundings. Rounded to another
      // dtype, values that were this close are at most one unit apart.
      c.close(normal, dtype == f64 ? 0 : 2 * epsilon(dtype),
              0.5 * 9.5 * 16 * epsilon(f64) + (dtype == f16 ? 0x1p-24 : 0));
      c.next();
    }
}

}  // namespace cuda_test
