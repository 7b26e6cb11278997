// Conversions between floats run on vectors; the rest is left to the compiler.
#include "kernels/host/convert.hpp"

#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/host/rows.hpp"

namespace tessera::kernels::host {
namespace {

template <class To, class From>
inline To cast(From x) {
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (std::is_integral_v<To> &&
                       (std::is_floating_point_v<From> || std::is_class_v<From>)) {
    using Wide = std::conditional_t<std::is_class_v<From>, float, From>;
    const Wide value = x;
    if (value != value) return 0;
    // The upper bound as a float is one above the largest integer, so `<` is exact.
    constexpr Wide above = static_cast<Wide>(std::uint64_t{1} << std::numeric_limits<To>::digits);
    if (value < (std::is_signed_v<To> ? -above : Wide(0))) return std::numeric_limits<To>::min();
    return value < above ? static_cast<To>(value) : std::numeric_limits<To>::max();
  } else if constexpr (std::is_class_v<To>) {
    return To(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

template <class To, class From>
void convert_floats(To* out, const From* in, std::int64_t n) {
  map(out, n, [](Vec<float> x) { return x; }, in);
}

template <class To, class From>
void convert_any(void* out, const void* in, std::int64_t n) {
  if constexpr (std::is_same_v<To, From>) {
    if (out != in && n > 0) std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(To));
  } else if constexpr ((std::is_same_v<From, float> && std::is_class_v<To> && sizeof(To) == 2) ||
                       (std::is_same_v<To, float> && std::is_class_v<From> && sizeof(From) == 2)) {
    convert(static_cast<To*>(out), static_cast<const From*>(in), n);
  } else {
    To* to = static_cast<To*>(out);
    const From* from = static_cast<const From*>(in);
    for (std::int64_t i = 0; i < n; ++i) to[i] = cast<To>(from[i]);
  }
}

template <class Raw>
void gather_raw(void* out, const void* in, std::int64_t stride, std::int64_t n) {
  Raw* to = static_cast<Raw*>(out);
  const Raw* from = static_cast<const Raw*>(in);
  if (stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(Raw));
  } else if (stride == 0) {
    const Raw value = *from;
    for (std::int64_t i = 0; i < n; ++i) to[i] = value;
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
  }
}

template <class Raw>
void scatter_raw(void* out, std::int64_t stride, const void* in, std::int64_t n) {
  Raw* to = static_cast<Raw*>(out);
  const Raw* from = static_cast<const Raw*>(in);
  if (stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(Raw));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i * stride] = from[i];
  }
}

}  // namespace

Converter converter(DType to, DType from) {
  return visit(to, [from](auto to_tag) {
    return visit(from, [](auto from_tag) -> Converter {
      return convert_any<typename decltype(to_tag)::type, typename decltype(from_tag)::type>;
    });
  });
}

void convert(float* out, const float* in, std::int64_t n) { convert_any<float, float>(out, in, n); }
void convert(double* out, const double* in, std::int64_t n) {
  convert_any<double, double>(out, in, n);
}

void convert(float* out, const BFloat16* in, std::int64_t n) { convert_floats(out, in, n); }
void convert(BFloat16* out, const float* in, std::int64_t n) { convert_floats(out, in, n); }
void convert(float* out, const Float16* in, std::int64_t n) { convert_floats(out, in, n); }
void convert(Float16* out, const float* in, std::int64_t n) { convert_floats(out, in, n); }

void gather_strided(void* out, const void* in, std::int64_t stride, std::int64_t n,
                    std::size_t size) {
  switch (size) {
    case 1:
      return gather_raw<std::uint8_t>(out, in, stride, n);
    case 2:
      return gather_raw<std::uint16_t>(out, in, stride, n);
    case 4:
      return gather_raw<std::uint32_t>(out, in, stride, n);
    default:
      return gather_raw<std::uint64_t>(out, in, stride, n);
  }
}

void scatter_strided(void* out, std::int64_t stride, const void* in, std::int64_t n,
                     std::size_t size) {
  switch (size) {
    case 1:
      return scatter_raw<std::uint8_t>(out, stride, in, n);
    case 2:
      return scatter_raw<std::uint16_t>(out, stride, in, n);
    case 4:
      return scatter_raw<std::uint32_t>(out, stride, in, n);
    default:
      return scatter_raw<std::uint64_t>(out, stride, in, n);
  }
}

}  // namespace tessera::kernels::host
