#include "kernels/flat_arrays.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/host/cpu.hpp"

namespace tessera::kernels {

void cpu::pack(const PackArgs& args, Exec&) {
  for (std::int32_t i = 0; i < args.entry_count; ++i) {
    const PackEntry& e = args.entries[i];
    const auto width = static_cast<std::int64_t>(size_bytes(args.src_dtype));
    const std::byte* const from = args.src + e.src * width;
    std::byte* const dst = args.dst + e.dst_bytes;
    const auto* const src = reinterpret_cast<const float*>(from);
    if (args.dst_dtype == args.src_dtype) {
      std::memcpy(dst, from, static_cast<std::size_t>(e.count * width));
    } else if (args.dst_dtype == DType::bf16) {
      auto* const out = reinterpret_cast<BFloat16*>(dst);
      for (std::int64_t j = 0; j < e.count; ++j) out[j] = BFloat16(src[j]);
    } else {
      auto* const out = reinterpret_cast<Float16*>(dst);
      for (std::int64_t j = 0; j < e.count; ++j) out[j] = Float16(src[j]);
    }
  }
}

namespace {

template <class T>
void write_count(const CompleteArgs& args, std::int32_t i, float value) {
  for (std::int32_t c = 0; c < args.copies; ++c)
    reinterpret_cast<T*>(args.counts + c * args.counts_stride_bytes)[i] = T(value);
}

}  // namespace

void cpu::complete(const CompleteArgs& args, Exec&) {
  const std::int32_t end = std::min(args.first + 64, args.entry_count);
  for (std::int32_t i = args.first; i < end; ++i) {
    const FlatSpan& e = args.entries[i];
    const bool arrived = (args.arrived >> (i - args.first) & 1u) != 0;
    const std::int64_t from = arrived || !args.zero_missing ? e.used_bytes : 0;
    std::memset(args.base + e.offset_bytes + from, 0,
                static_cast<std::size_t>(e.padded_bytes - from));
    if (!arrived && !args.zero_missing) continue;
    const float value = arrived ? 1.f : 0.f;
    if (args.dtype == DType::f32)
      write_count<float>(args, i, value);
    else if (args.dtype == DType::f64)
      write_count<double>(args, i, value);
    else if (args.dtype == DType::bf16)
      write_count<BFloat16>(args, i, value);
    else
      write_count<Float16>(args, i, value);
  }
}

}  // namespace tessera::kernels
