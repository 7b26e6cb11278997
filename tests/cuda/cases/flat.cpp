#include <cstring>

#include "tests/cuda/case.hpp"

namespace cuda_test {

TESSERA_CASE("flat", "pack: entries of any length, aligned and not") {
  for (const DType dtype : {f32, bf16, f16}) {
    const auto size = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t lengths[] = {5000, 0, 1, 3, 64, 4097, 7};
    constexpr std::int32_t count = 7;
    Operand &entries = c.input(i64, 3 * count), &src = c.input(f32, 12000),
            &dst = c.updated(dtype, 12000);
    std::int64_t from = 0, to = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (i % 2 == 0) {  // every second entry begins at 16 bytes on both sides
        from = (from + 3) / 4 * 4;
        to = (to + 7) / 8 * 8;
      } else {
        ++to;
      }
      const PackEntry entry{from, to * size, lengths[i]};
      std::memcpy(entries.at<PackEntry>(Side::reference) + i, &entry, sizeof entry);
      from += lengths[i];
      to += lengths[i];
    }
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      k.pack({.dst = dst.at<std::byte>(side),
              .src = src.at<float>(side),
              .entries = entries.at<PackEntry>(side),
              .entry_count = count,
              .dst_dtype = dtype},
             exec);
    });
    c.equal(dst);
    c.next();
  }
}

TESSERA_CASE("flat", "complete: padding, missing gradients and counts") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const bool zero_missing : {false, true}) {
      for (const std::int32_t first : {0, 64}) {
        if ((first == 0) != (dtype == f32 || dtype == f16)) continue;
        constexpr std::int32_t count = 70;
        Operand &entries = c.input(i64, 3 * count), &base = c.updated(i64, 40000, -9, 9),
                &counts = c.updated(dtype, 3 * 80);
        std::int64_t offset = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t used = i == 5 ? 170000 : 2 * c.integer(0, 300),
                             padded = i % 3 == 0 ? used : used + 2 * c.integer(0, 300);
          const FlatSpan entry{offset, used, padded};
          std::memcpy(entries.at<FlatSpan>(Side::reference) + i, &entry, sizeof entry);
          offset += padded + 2 * c.integer(0, 9);
        }
        const auto arrived = static_cast<std::uint64_t>(c.integer(0, INT64_MAX)) & ~(1ull << 5);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          k.complete({.base = base.at<std::byte>(side),
                      .entries = entries.at<FlatSpan>(side),
                      .counts = counts.at<std::byte>(side),
                      .counts_stride_bytes = static_cast<std::int64_t>(80 * size_bytes(dtype)),
                      .arrived = arrived,
                      .first = first,
                      .entry_count = count,
                      .copies = 3,
                      .dtype = dtype,
                      .zero_missing = zero_missing},
                     exec);
        });
        c.equal(base);
        c.equal(counts);
        c.next();
      }
    }
}

}  // namespace cuda_test
