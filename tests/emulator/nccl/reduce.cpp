#include "tests/emulator/nccl/reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tessera::nccl_double {
namespace {

// The type in which one hop computes.
template <class T>
auto wide(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(value);
  else
    return value;
}
template <class T, class Wide>
T rounded(Wide value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(value);
  else
    return static_cast<T>(value);
}

template <class Wide>
Wide joined(Wide a, Wide b, ncclRedOp_t op) {
  if constexpr (std::is_floating_point_v<Wide>) {
    if (op == ncclMax) return std::fmax(a, b);
    if (op == ncclMin) return std::fmin(a, b);
    return op == ncclProd ? a * b : a + b;
  } else {
    using Unsigned = std::make_unsigned_t<Wide>;  // it wraps around
    if (op == ncclMax) return std::max(a, b);
    if (op == ncclMin) return std::min(a, b);
    const auto x = static_cast<std::uint64_t>(static_cast<Unsigned>(a));
    const auto y = static_cast<std::uint64_t>(static_cast<Unsigned>(b));
    return static_cast<Wide>(op == ncclProd ? x * y : x + y);
  }
}

template <class T>
void reduce_as(void* out, std::span<const std::byte* const> from, std::size_t count,
               ncclRedOp_t op) {
  using Wide = decltype(wide(T{}));
  constexpr bool is_float = std::is_floating_point_v<Wide>;
  const auto load = [&](std::size_t rank, std::size_t i) {
    T value;
    std::memcpy(static_cast<void*>(&value), from[rank] + i * sizeof(T), sizeof(T));
    if constexpr (is_float)  // an average of floats is a sum of scaled ones
      if (op == ncclAvg)
        return wide(rounded<T>(wide(value) * (Wide{1} / static_cast<Wide>(from.size()))));
    return wide(value);
  };
  for (std::size_t i = 0; i < count; ++i) {
    T sum = rounded<T>(load(0, i));
    for (std::size_t rank = 1; rank < from.size(); ++rank)
      sum = rounded<T>(joined<Wide>(wide(sum), load(rank, i), op));
    if constexpr (!is_float)
      if (op == ncclAvg) sum = static_cast<T>(sum / static_cast<T>(from.size()));
    std::memcpy(static_cast<std::byte*>(out) + i * sizeof(T), static_cast<const void*>(&sum),
                sizeof(T));
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t dtype) {
  static constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[dtype];
}

const char* name_of(ncclDataType_t dtype) {
  static constexpr const char* kNames[] = {"int8",    "uint8",    "int32",      "uint32",
                                           "int64",   "uint64",   "float16",    "float32",
                                           "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return kNames[dtype];
}

const char* name_of(ncclRedOp_t op) {
  static constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg"};
  return op < ncclNumOps ? kNames[op] : "an unknown operator";
}

bool is_reduced(ncclDataType_t dtype) { return dtype < ncclFloat8e4m3; }

void reduce(void* out, std::span<const std::byte* const> from, std::size_t count,
            ncclDataType_t dtype, ncclRedOp_t op) {
  switch (dtype) {
    case ncclInt8:
      return reduce_as<std::int8_t>(out, from, count, op);
    case ncclUint8:
      return reduce_as<std::uint8_t>(out, from, count, op);
    case ncclInt32:
      return reduce_as<std::int32_t>(out, from, count, op);
    case ncclUint32:
      return reduce_as<std::uint32_t>(out, from, count, op);
    case ncclInt64:
      return reduce_as<std::int64_t>(out, from, count, op);
    case ncclUint64:
      return reduce_as<std::uint64_t>(out, from, count, op);
    case ncclFloat16:
      return reduce_as<__half>(out, from, count, op);
    case ncclFloat32:
      return reduce_as<float>(out, from, count, op);
    case ncclFloat64:
      return reduce_as<double>(out, from, count, op);
    case ncclBfloat16:
      return reduce_as<__nv_bfloat16>(out, from, count, op);
    default:
      return;
  }
}

}  // namespace tessera::nccl_double
