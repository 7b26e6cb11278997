#include "tests/cuda/case.hpp"

namespace cuda_test {

TESSERA_CASE("dropout", "the CPU's bits, with offsets from host and device, in place, misaligned") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{7}, c.integer(2048, 2070)})
      for (const bool moved : {false, true}) {
        const auto shift = moved ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
        const auto p = static_cast<float>(c.uniform(0.05, 0.95));
        const auto key = static_cast<std::uint64_t>(c.integer(0, 1LL << 62));
        const std::int64_t from_host = c.integer(0, 1LL << 40);
        Operand &x = c.input(dtype, n, -2, 2, shift), &y = c.output(dtype, n, shift),
                &z = c.updated(dtype, n), &offset = c.input(i64, 1, 0, 1e9);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          k.dropout({.y = y.at(side),
                     .x = x.at(side),
                     .device_offset = offset.at<std::int64_t>(side),
                     .key = key,
                     .host_offset = from_host,
                     .count = n,
                     .p = p,
                     .dtype = dtype},
                    exec);
          k.dropout({.y = z.at(side),
                     .x = z.at(side),
                     .device_offset = nullptr,
                     .key = key,
                     .host_offset = 0,
                     .count = n,
                     .p = moved ? 1.0f : 0.0f,
                     .dtype = dtype},
                    exec);
        });
        c.equal(y);
        c.equal(z);
        c.next();
      }
}

}  // namespace cuda_test
