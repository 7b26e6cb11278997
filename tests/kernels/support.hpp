// What tests of the CPU's kernels alone share: arrays of any dtype seen as doubles, fresh random
// values, and the comparison of one thread with three.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "kernels/peer_memory.hpp"
#include "tessera/device/workers.hpp"
#include "tests/kernels/bounded.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

namespace kernel_test {

using namespace tessera;
using namespace tessera::kernels;

// `size` elements of `dtype` that tests read and write as doubles.
struct Array {
  DType dtype;
  std::vector<std::byte> bytes;

  Array(DType d, std::int64_t size)
      : dtype(d), bytes(static_cast<std::size_t>(size) * size_bytes(d)) {}

  std::int64_t size() const { return static_cast<std::int64_t>(bytes.size() / size_bytes(dtype)); }
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }

  double operator[](std::int64_t i) const {
    return visit(dtype, [&](auto tag) {
      typename decltype(tag)::type x;
      std::memcpy(&x, bytes.data() + static_cast<std::size_t>(i) * sizeof x, sizeof x);
      return static_cast<double>(x);
    });
  }
  void set(std::int64_t i, double value) {
    visit(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      T x;
      if constexpr (std::is_class_v<T>)
        x = T(static_cast<float>(value));
      else
        x = static_cast<T>(value);
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof x, &x, sizeof x);
    });
  }
  void fill(double value) {
    for (std::int64_t i = 0; i < size(); ++i) set(i, value);
  }
};

// Draws the seed of a test case; use with INFO("seed " << random.seed).
struct Random {
  unsigned seed = testing::fresh_seed();
  std::mt19937_64 engine{seed};

  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine);
  }
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine);
  }

  Array array(DType dtype, std::int64_t size, double low = -2, double high = 2) {
    Array a(dtype, size);
    for (std::int64_t i = 0; i < size; ++i)
      a.set(i, is_floating(dtype) ? uniform(low, high) : std::floor(uniform(low, high + 1)));
    if (dtype == DType::boolean)
      for (std::int64_t i = 0; i < size; ++i) a.set(i, static_cast<double>(integer(0, 1)));
    return a;
  }
};

// Calls run(exec) on one thread and on three, from the same contents of `outputs`, and requires the
// same bytes.
template <class Run, class... Outputs>
void on_threads(Run run, Outputs&... outputs) {
  const auto before = std::make_tuple(outputs.bytes...);
  Exec alone;
  run(alone);
  const auto after = std::make_tuple(outputs.bytes...);
  std::tie(outputs.bytes...) = before;
  WorkerPool pool(3);
  Exec shared;
  shared.workers = &pool;
  run(shared);
  const bool same_bits = std::make_tuple(outputs.bytes...) == after;
  REQUIRE(same_bits);
}

}  // namespace kernel_test
