// What the tests of this folder share: random f64 inputs from a printed seed, and views of them.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/gradcheck.hpp"
#include "tessera/autograd/ops.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/seed.hpp"

namespace tessera::testing {

// Draws tensors; each call another one.
struct Draw {
  std::uint64_t seed = fresh_seed();
  Device device = Device::cpu({.executor = ExecutorKind::inlined});

  Tensor uniform(const Shape& shape, double low, double high) {
    return Tensor::uniform(shape, low, high, key(), f64, device);
  }
  Tensor normal(const Shape& shape) { return Tensor::normal(shape, 0, 1, key(), f64, device); }
  // 0.1 to 2 in size, of either sign: no kink at 0 is near.
  Tensor away_from_zero(const Shape& shape) {
    const Tensor x = uniform(shape, -1.9, 1.9);
    const Tensor sign =
        raw::where(x < Tensor::zeros({}, f64, device), Tensor::full({}, -0.1, f64, device),
                   Tensor::full({}, 0.1, f64, device));
    return raw::add(x, sign);
  }
  // Values at least 0.01 apart in random order, so that no two are near a tie.
  Tensor distinct(const Shape& shape) {
    std::vector<double> v(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = 0.01 * static_cast<double>(i) - 0.1;
    std::mt19937_64 rng(key());
    for (std::size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[rng() % i]);
    return Tensor::from(v, shape, device);
  }
  // Indices below n, repeats among them.
  Tensor indices(const Shape& shape, std::int64_t n, DType dtype) {
    std::mt19937_64 rng(key());
    std::vector<std::int64_t> v(static_cast<std::size_t>(shape.numel()));
    for (auto& i : v) i = static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(n));
    return raw::cast(Tensor::from(v, shape, device), dtype);
  }

 private:
  std::uint64_t key() { return seed + 1000003 * ++calls_; }
  std::uint64_t calls_ = 0;
};

inline Device any_device() { return Device::cpu({.executor = any_executor()}); }

inline std::vector<std::byte> bytes_of(const Tensor& x) {
  std::vector<std::byte> out(static_cast<std::size_t>(x.numel()) * size_bytes(x.dtype()));
  x.to_bytes(out);
  return out;
}

inline Tensor behind(const Tensor& x) { return x * 1.0; }

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

inline void check_gradients(const Function& f, const std::vector<Tensor>& inputs) {
  const GradcheckReport report = gradcheck(f, inputs);
  INFO(report.message);
  CHECK(report.passed);
}

// A way to see x [4, 3] as another layout, and the shape to start from.
struct Layout {
  std::string name;
  Shape shape;
  Tensor (*view)(const Tensor&);
};
inline std::vector<Layout> layouts() {
  return {{"contiguous", {4, 3}, [](const Tensor& x) { return x; }},
          {"transposed", {3, 4}, [](const Tensor& x) { return transpose(x, 0, 1); }},
          {"sliced", {4, 7}, [](const Tensor& x) { return slice(x, 1, 2, 5); }},
          {"broadcast", {4, 1}, [](const Tensor& x) { return expand(x, {4, 3}); }},
          {"three dimensions, permuted",
           {3, 2, 2},
           [](const Tensor& x) { return permute(x, {2, 0, 1}); }},
          {"one element", {}, [](const Tensor& x) { return x; }},
          {"no element", {0, 3}, [](const Tensor& x) { return x; }}};
}

}  // namespace tessera::testing
