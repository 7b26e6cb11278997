#include "tessera/tensor/initializer.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/base/philox.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kFilledAtOnce = std::int64_t{1} << 20;  // elements that the host holds

// The share of normal values below z.
double below(double z) { return std::erfc(-z / std::numbers::sqrt2) / 2; }

// Draw `attempt` of element i: Box and Muller's formula, as in kernels/random.hpp.
double normal_at(std::uint64_t key, std::int64_t i, std::uint64_t attempt) {
  const auto w = philox(key, static_cast<std::uint64_t>(i), attempt);
  const auto unit = [](std::uint32_t high, std::uint32_t low) {
    return static_cast<double>(std::uint64_t{high} << 32 | low);
  };
  return std::sqrt(-2 * std::log((unit(w[0], w[1]) + 0.5) * 0x1p-64)) *
         std::cos(2 * std::numbers::pi * (unit(w[2], w[3]) * 0x1p-64));
}

void check_finite(const char* name, double a, double b) {
  TESSERA_EXPECT(std::isfinite(a) && std::isfinite(b), "Initializer::", name, ": ", a, " and ", b,
                 "; expected finite numbers");
}

}  // namespace

Initializer Initializer::constant(double value) { return {Kind::constant, value, 0}; }

Initializer Initializer::normal(double mean, double deviation) {
  check_finite("normal", mean, deviation);
  TESSERA_EXPECT(deviation >= 0, "Initializer::normal: a deviation of ", deviation,
                 "; expected 0 or more");
  return {Kind::normal, mean, deviation};
}

Initializer Initializer::uniform(double low, double high) {
  check_finite("uniform", low, high);
  TESSERA_EXPECT(low <= high, "Initializer::uniform: from ", low, " to ", high,
                 "; expected the lower one first");
  return {Kind::uniform, low, high};
}

Initializer Initializer::truncated_normal(double mean, double deviation, double low, double high) {
  check_finite("truncated_normal", mean, deviation);
  TESSERA_EXPECT(deviation > 0, "Initializer::truncated_normal: a deviation of ", deviation,
                 "; expected more than 0");
  const double share = below((high - mean) / deviation) - below((low - mean) / deviation);
  TESSERA_EXPECT(share >= 0.01, "Initializer::truncated_normal: ", low, " to ", high,
                 " holds a share of ", share, " of the values around ", mean,
                 " with a deviation of ", deviation, "; expected 0.01 or more");
  return by_index([=](std::int64_t i, std::uint64_t key) {
    for (std::uint64_t attempt = 0;; ++attempt)
      if (const double x = mean + deviation * normal_at(key, i, attempt); low <= x && x <= high)
        return x;
  });
}

Initializer Initializer::scaled(Kind kind, double gain, bool is_uniform, Fan fan) {
  TESSERA_EXPECT(std::isfinite(gain) && gain >= 0, "Initializer: a gain of ", gain,
                 "; expected 0 or more");
  Initializer out(kind, gain, 0);
  out.is_uniform_ = is_uniform;
  out.fan_ = fan;
  return out;
}
Initializer Initializer::kaiming_normal(double gain, Fan fan) {
  return scaled(Kind::kaiming, gain, false, fan);
}
Initializer Initializer::kaiming_uniform(double gain, Fan fan) {
  return scaled(Kind::kaiming, gain, true, fan);
}
Initializer Initializer::xavier_normal(double gain) {
  return scaled(Kind::xavier, gain, false, Fan::in);
}
Initializer Initializer::xavier_uniform(double gain) {
  return scaled(Kind::xavier, gain, true, Fan::in);
}

void Initializer::fill(const Tensor& out, const Shape& whole, std::uint64_t key,
                       std::int64_t first) const {
  if (is_storage_only(out.dtype())) {  // in which nothing is drawn
    const Tensor drawn = Tensor::empty(out.shape(), f32, out.device());
    fill(drawn, whole, key, first);
    return raw::copy_into(out, drawn);
  }
  switch (kind_) {
    case Kind::constant:
      return raw::fill(out, a_);
    case Kind::normal:
      return raw::normal_into(out, a_, b_, key, first);
    case Kind::uniform:
      return raw::uniform_into(out, a_, b_, key, first);
    case Kind::by_index:
      return fill_by_index(out, key, first);
    case Kind::kaiming:
    case Kind::xavier:
      break;
  }
  TESSERA_EXPECT(whole.ndim() >= 2, "Initializer: a tensor of ", whole,
                 " has no fans; expected [out, in, ...], or a normal or uniform initializer");
  double field = 1;  // of a convolution
  for (int d = 2; d < whole.ndim(); ++d) field *= static_cast<double>(whole[d]);
  const double in = static_cast<double>(whole[1]) * field,
               to = static_cast<double>(whole[0]) * field;
  const double fan = kind_ == Kind::xavier ? (in + to) / 2 : fan_ == Fan::in ? in : to;
  const double deviation = fan > 0 ? a_ / std::sqrt(fan) : 0;
  if (!is_uniform_) return raw::normal_into(out, 0, deviation, key, first);
  const double bound = std::numbers::sqrt3 * deviation;
  raw::uniform_into(out, -bound, bound, key, first);
}

void Initializer::fill_by_index(const Tensor& out, std::uint64_t key, std::int64_t first) const {
  const Device& device = out.device();
  if (device.is_meta()) return;
  std::vector<double> values;
  for (std::int64_t begin = 0; begin < out.numel(); begin += kFilledAtOnce) {
    const std::int64_t count = std::min(kFilledAtOnce, out.numel() - begin);
    values.assign(static_cast<std::size_t>(count), 0);
    if (device.runs_bodies())
      for (std::int64_t i = 0; i < count; ++i)
        values[static_cast<std::size_t>(i)] = element_(first + begin + i, key);
    if (!is_floating(out.dtype()))
      for (const double x : values)
        TESSERA_EXPECT(x == std::nearbyint(x) && std::abs(x) < 0x1p31, "Initializer: ", x,
                       " for an element of ", out.dtype(), "; expected a whole number");
    raw::copy_into(out.view({count}, {1}, begin), Tensor::from(values, {count}, device));
  }
}

}  // namespace tessera
