// The naive twin of a tensor: a shape and values in row-major order, with views made by walking
// coordinates. What the tests of this folder compare with.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/seed.hpp"

namespace tessera::testing {

struct Host {
  Shape shape;
  std::vector<double> values;

  static Host make(const Shape& shape) {
    return {shape, std::vector<double>(static_cast<std::size_t>(shape.numel()))};
  }
  // f(coordinates) for every element.
  static Host build(const Shape& shape, const std::function<double(const Shape&)>& f) {
    Host out = make(shape);
    for (std::int64_t i = 0; i < shape.numel(); ++i) {
      Shape at = shape;
      for (std::int64_t d = shape.ndim() - 1, rest = i; d >= 0;
           rest /= shape[static_cast<int>(d--)])
        at[static_cast<int>(d)] = rest % shape[static_cast<int>(d)];
      out.values[static_cast<std::size_t>(i)] = f(at);
    }
    return out;
  }
  double at(const Shape& position) const {
    std::int64_t i = 0;
    for (int d = 0; d < shape.ndim(); ++d) i = i * shape[d] + position[d];
    return values[static_cast<std::size_t>(i)];
  }
  // The element that broadcasting puts at `position` of a larger shape.
  double spread(const Shape& position) const {
    Shape own = shape;
    for (int d = 0; d < shape.ndim(); ++d)
      own[d] = shape[d] == 1 ? 0 : position[position.ndim() - shape.ndim() + d];
    return at(own);
  }
};

// One step of making a view, for a tensor and its twin.
struct Step {
  enum Kind { permute, slice, expand } kind;
  std::vector<std::int64_t> args;  // the order; dimension, begin, end; the shape
};
struct View {
  std::string name;
  Shape base;
  std::vector<Step> steps;
};

inline Tensor apply(const Tensor& x, const Step& s) {
  if (s.kind == Step::slice)
    return raw::slice(x, static_cast<int>(s.args[0]), s.args[1], s.args[2]);
  if (s.kind == Step::expand) return raw::expand(x, Shape(std::span(s.args)));
  return raw::permute(x, std::vector<int>(s.args.begin(), s.args.end()));
}
inline Host apply(const Host& x, const Step& s) {
  if (s.kind == Step::slice) {
    const int d = static_cast<int>(s.args[0]);
    return Host::build(x.shape.with(d, s.args[2] - s.args[1]), [&](Shape at) {
      at[d] += s.args[1];
      return x.at(at);
    });
  }
  if (s.kind == Step::expand)
    return Host::build(Shape(std::span(s.args)), [&](const Shape& at) { return x.spread(at); });
  Shape shape;
  for (const std::int64_t o : s.args) shape.push_back(x.shape[static_cast<int>(o)]);
  return Host::build(shape, [&](const Shape& at) {
    Shape own = x.shape;
    for (int d = 0; d < at.ndim(); ++d)
      own[static_cast<int>(s.args[static_cast<std::size_t>(d)])] = at[d];
    return x.at(own);
  });
}

// Views that all end as [2, 3, 4], then others that end elsewhere.
inline std::vector<View> same_shape_views() {
  return {{"contiguous", {2, 3, 4}, {}},
          {"transposed", {4, 3, 2}, {{Step::permute, {2, 1, 0}}}},
          {"rotated", {4, 2, 3}, {{Step::permute, {1, 2, 0}}}},
          {"sliced", {5, 3, 9}, {{Step::slice, {0, 2, 4}}, {Step::slice, {2, 3, 7}}}},
          {"sliced and swapped", {2, 7, 3}, {{Step::slice, {1, 1, 5}}, {Step::permute, {0, 2, 1}}}},
          {"broadcast", {3, 1}, {{Step::expand, {2, 3, 4}}}},
          {"broadcast in the middle", {2, 1, 4}, {{Step::expand, {2, 3, 4}}}}};
}
inline std::vector<View> odd_views() {
  return {
      {"one element", {}, {}},
      {"no element", {3, 0, 2}, {}},
      {"no element, permuted", {3, 0, 2}, {{Step::permute, {2, 0, 1}}}},
      {"size 1 with an odd stride", {1, 5, 3}, {{Step::permute, {1, 0, 2}}}},
      {"five dimensions that do not merge", {2, 3, 2, 3, 2}, {{Step::permute, {4, 2, 0, 3, 1}}}},
      {"six dimensions that do not merge",
       {2, 3, 2, 2, 3, 2},
       {{Step::permute, {5, 1, 4, 0, 3, 2}}}},
      {"long enough for several tasks", {3, 20001}, {{Step::slice, {1, 1, 20000}}}}};
}

// Relative rounding error of a dtype: half its spacing at 1.
inline double unit_roundoff(DType d) {
  return d == f64 ? 0x1p-53 : d == f32 ? 0x1p-24 : d == bf16 ? 0x1p-8 : d == f16 ? 0x1p-11 : 0;
}
// What `dtype` holds of a value.
inline double rounded(double value, DType dtype) {
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2)
      return static_cast<double>(static_cast<float>(T(static_cast<float>(value))));
    else
      return static_cast<double>(static_cast<T>(value));
  });
}

inline Tensor to_device(const Host& x, DType dtype, const Device& device) {
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<std::byte> bytes(x.values.size() * sizeof(T));
    for (std::size_t i = 0; i < x.values.size(); ++i) {
      T value;
      if constexpr (sizeof(T) == 2)
        value = T(static_cast<float>(x.values[i]));
      else
        value = static_cast<T>(x.values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
    return Tensor::from_bytes(bytes, x.shape, dtype, device);
  });
}
inline Host to_host(const Tensor& x) {
  return visit(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<std::byte> bytes(static_cast<std::size_t>(x.numel()) * sizeof(T));
    x.to_bytes(bytes);
    Host out = Host::make(x.shape());
    for (std::size_t i = 0; i < out.values.size(); ++i) {
      T value;
      std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
      out.values[i] = static_cast<double>(value);
    }
    return out;
  });
}

// A tensor and its twin, drawn from a seed: normal for floating dtypes, but at most kLargest, which
// bounds rounding errors for every seed; -5 to 5 for integers.
constexpr double kLargest = 3;
struct Pair {
  Tensor tensor;
  Host host;
};
struct Draw {
  std::uint64_t seed = fresh_seed();
  std::mt19937_64 rng{seed};

  Pair operator()(const View& view, DType dtype, const Device& device) {
    std::normal_distribution<double> normal;
    const auto bounded = [&] {
      double v = 0;
      do v = normal(rng);
      while (std::abs(v) > kLargest);
      return v;
    };
    Host host = Host::make(view.base);
    for (double& v : host.values)
      v = is_floating(dtype) ? rounded(bounded(), dtype)
          : dtype == boolean ? static_cast<double>(rng() % 2)
                             : static_cast<double>(rng() % 11) - 5;
    Tensor tensor = to_device(host, dtype, device);
    for (const Step& step : view.steps) {
      tensor = apply(tensor, step);
      host = apply(host, step);
    }
    return {tensor, host};
  }
  Pair operator()(const Shape& shape, DType dtype, const Device& device) {
    return (*this)(View{"", shape, {}}, dtype, device);
  }
};

// Whether `got` has the shape, dtype and values of `expected`, each within tolerance(expected
// value). NaN equals NaN.
inline void check_values(const Tensor& got, DType dtype, const Host& expected,
                         const std::function<double(double)>& tolerance = {}) {
  REQUIRE(got.dtype() == dtype);
  REQUIRE(got.shape() == expected.shape);
  const Host values = to_host(got);
  std::size_t wrong = 0, first = 0;
  for (std::size_t i = 0; i < values.values.size(); ++i) {
    const double a = values.values[i], b = expected.values[i];
    // Rounded: beyond the largest number of a 16-bit type there is infinity alone.
    const bool same = a == b || (std::isnan(a) && std::isnan(b)) ||
                      (is_floating(dtype) && a == rounded(b, dtype)) ||
                      (tolerance && std::abs(a - b) <= tolerance(b));
    if (!same && wrong++ == 0) first = i;
  }
  INFO("element " << first << " is " << (wrong ? values.values[first] : 0) << ", expected "
                  << (wrong ? expected.values[first] : 0));
  CHECK(wrong == 0);
}

inline Device any_device() { return Device::cpu({.executor = any_executor(), .threads = 2}); }

}  // namespace tessera::testing
