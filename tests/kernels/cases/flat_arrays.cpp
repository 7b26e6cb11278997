// The flat arrays of sharding: packing shards, completing gradients.
#include <cstring>
#include <utility>

#include "tests/kernels/case.hpp"

namespace kernel_test {

TESSERA_CASE("flat", "pack: entries of any length, aligned and not") {
  for (const auto& [dtype, src_dtype] :
       {std::pair(f32, f32), std::pair(bf16, f32), std::pair(f16, f32), std::pair(bf16, bf16),
        std::pair(f16, f16), std::pair(e4m3, e4m3)}) {
    const auto size = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t lengths[] = {5000, 0, 1, 3, 64, 4097, 7};
    constexpr std::int32_t count = 7;
    Operand &entries = c.input(i64, 3 * count), &src = c.input(src_dtype, 12000),
            &dst = c.updated(dtype, 12000);
    std::vector<double> expected;
    for (std::int64_t i = 0; i < dst.size(); ++i) expected.push_back(dst.get(i));
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
      for (std::int64_t j = 0; j < lengths[i]; ++j)
        expected[static_cast<std::size_t>(to + j)] = rounded_to(dtype, src.get(from + j));
      from += lengths[i];
      to += lengths[i];
    }
    c.compute([&, dtype = dtype, src_dtype = src_dtype](const Kernels& k, Side side, Exec& exec) {
      k.pack({.dst = dst.at<std::byte>(side),
              .src = src.at<std::byte>(side),
              .entries = entries.at<PackEntry>(side),
              .entry_count = count,
              .dst_dtype = dtype,
              .src_dtype = src_dtype},
             exec);
    });
    for (std::int64_t i = 0; i < dst.size(); ++i)
      c.near(dst, i, expected[static_cast<std::size_t>(i)], 0);
    c.next();
  }
}

TESSERA_CASE("flat", "complete: padding, missing gradients and counts") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const bool zero_missing : {false, true}) {
      for (const std::int32_t first : {0, 64}) {
        if ((first == 0) != (dtype == f32 || dtype == f16)) continue;
        constexpr std::int32_t count = 70, copies = 3, stride = 80;
        // Bytes as booleans, so that each can be looked at.
        Operand &entries = c.input(i64, 3 * count), &base = c.updated(boolean, 320000),
                &counts = c.updated(dtype, copies * stride);
        const auto arrived = static_cast<std::uint64_t>(c.integer(0, INT64_MAX)) & ~(1ull << 5);
        std::vector<char> becomes_zero(320000, 0);
        std::vector<double> expected;  // counts of one copy after another
        for (std::int64_t i = 0; i < counts.size(); ++i) expected.push_back(counts.get(i));
        std::int64_t offset = 0;
        for (std::int32_t i = 0; i < count; ++i) {
          const std::int64_t used = i == 5 ? 170000 : 2 * c.integer(0, 300),
                             padded = i % 3 == 0 ? used : used + 2 * c.integer(0, 300);
          const FlatSpan span{offset, used, padded};
          std::memcpy(entries.at<FlatSpan>(Side::reference) + i, &span, sizeof span);
          if (i >= first && i < first + 64) {
            const bool came = (arrived >> (i - first) & 1u) != 0;
            const std::int64_t begin = offset + (came || !zero_missing ? used : 0);
            for (std::int64_t b = begin; b < offset + padded; ++b)
              becomes_zero[static_cast<std::size_t>(b)] = 1;
            for (std::int32_t copy = 0; copy < copies && (came || zero_missing); ++copy)
              expected[static_cast<std::size_t>(copy * stride + i)] = came ? 1 : 0;
          }
          offset += padded + 2 * c.integer(0, 9);
        }
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          k.complete({.base = base.at<std::byte>(side),
                      .entries = entries.at<FlatSpan>(side),
                      .counts = counts.at<std::byte>(side),
                      .counts_stride_bytes = static_cast<std::int64_t>(stride * size_bytes(dtype)),
                      .arrived = arrived,
                      .first = first,
                      .entry_count = count,
                      .copies = copies,
                      .dtype = dtype,
                      .zero_missing = zero_missing},
                     exec);
        });
        for (std::int64_t b = 0; b < base.size(); ++b)
          c.near(base, b, becomes_zero[static_cast<std::size_t>(b)] != 0 ? 0 : base.get(b), 0);
        for (std::int64_t i = 0; i < counts.size(); ++i)
          c.near(counts, i, expected[static_cast<std::size_t>(i)], 0);
        c.next();
      }
    }
}

}  // namespace kernel_test
