#include "tessera/tensor/make.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/tensor/launch.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

using raw::Binary;

namespace {

// The largest n of which a dtype has all whole numbers from -n to n, and integers from -n - 1.
double whole_numbers(DType dtype) {
  switch (dtype) {
    case boolean:
      return 1;
    case e5m2:
      return 8;
    case e4m3:
      return 16;
    case bf16:
      return 0x1p8;
    case f16:
      return 0x1p11;
    case f32:
      return 0x1p24;
    case u8:
      return 0x1p8 - 1;
    case i32:
      return 0x1p31 - 1;
    default:
      return 0x1p53;  // what a double, which counts here, has of f64 and i64
  }
}

void expect_whole(const char* name, DType dtype, double least, double most) {
  const double end = whole_numbers(dtype), begin = dtype == boolean || dtype == u8 ? 0
                                                   : dtype == i32                  ? -end - 1
                                                                                   : -end;
  TESSERA_EXPECT(least >= begin && most <= end, name, ": ", least, " to ", most,
                 " is beyond the range of ", dtype, ", ", begin, " to ", end,
                 "; give a wider dtype");
}

Tensor steps(double first, double step, std::int64_t count, DType dtype, const Device& device) {
  Tensor out = Tensor::empty({count}, dtype, device);
  if (count == 0 || device.is_meta()) return out;
  detail::launch("arange", device, detail::table(device).arange,
                 kernels::ArangeArgs{out.data(), first, step, count, dtype}, {detail::writes(out)});
  return out;
}

void check_drawn(const char* name, const Tensor& out) {
  TESSERA_EXPECT(out.is_contiguous() && is_floating(out.dtype()), name, ": the tensor is ",
                 out.dtype(), out.is_contiguous() ? "" : ", strided",
                 "; expected a contiguous floating one");
  TESSERA_EXPECT(out.device().is_meta() || !out.device().context().is_capturing(), name,
                 ": a captured step would draw the same in every replay; make it an input");
}

// In (0, 1), of 48 random bits: the library's uniform numbers have 24.
Tensor fine_uniform(const Shape& shape, std::uint64_t key, const Device& device) {
  const Tensor coarse = Tensor::uniform(shape, 0, 1, key, f64, device);
  return raw::add(coarse, Tensor::uniform(shape, 0x1p-49, 0x1p-24, fnv1a(1, key), f64, device));
}

}  // namespace

Tensor Tensor::full(const Shape& shape, double value, DType dtype, const Device& device,
                    Caller at) {
  const CallSite site("full", at);
  Tensor out = empty(shape, dtype, device);
  raw::fill(out, value);
  return out;
}
Tensor Tensor::zeros(const Shape& shape, DType dtype, const Device& device, Caller at) {
  const CallSite site("zeros", at);
  return full(shape, 0, dtype, device);
}
Tensor Tensor::ones(const Shape& shape, DType dtype, const Device& device, Caller at) {
  const CallSite site("ones", at);
  return full(shape, 1, dtype, device);
}

Tensor Tensor::arange(std::int64_t n, DType dtype, const Device& device, Caller at) {
  const CallSite site("arange", at);
  return steps(0, 1, n, dtype, device);
}

Tensor Tensor::normal(const Shape& shape, double mean, double deviation, std::uint64_t key,
                      DType dtype, const Device& device, Caller at) {
  const CallSite site("normal", at);
  Tensor out = empty(shape, dtype, device);
  raw::normal_into(out, mean, deviation, key, 0);
  return out;
}

void raw::normal_into(const Tensor& out, double mean, double deviation, std::uint64_t key,
                      std::int64_t first) {
  check_drawn("normal_into", out);
  if (out.numel() == 0 || out.device().is_meta()) return;
  detail::launch(
      "normal", out.device(), detail::table(out.device()).normal,
      kernels::NormalArgs{out.data(), key, first, out.numel(), mean, deviation, out.dtype()},
      {detail::writes(out)});
}

Tensor Tensor::uniform(const Shape& shape, double low, double high, std::uint64_t key, DType dtype,
                       const Device& device, Caller at) {
  const CallSite site("uniform", at);
  Tensor out = empty(shape, dtype, device);
  raw::uniform_into(out, low, high, key, 0);
  return out;
}

void raw::uniform_into(const Tensor& out, double low, double high, std::uint64_t key,
                       std::int64_t first) {
  check_drawn("uniform_into", out);
  TESSERA_EXPECT(low <= high, "uniform: [", low, ", ", high,
                 ") holds no number; give the lower end first");
  if (out.numel() == 0 || out.device().is_meta()) return;
  detail::launch("uniform", out.device(), detail::table(out.device()).uniform,
                 kernels::UniformArgs{out.data(), key, first, out.numel(), low, high, out.dtype()},
                 {detail::writes(out)});
}

Tensor arange(double from, double to, double step, DType dtype, const Device& device, Caller at) {
  const CallSite site("arange", at);
  TESSERA_EXPECT(step != 0 && (to - from) / step >= 0 && std::isfinite((to - from) / step),
                 "arange: no step of ", step, " leads from ", from, " to ", to);
  const auto count = static_cast<std::int64_t>(std::ceil((to - from) / step));
  if (count > 0 && !is_floating(dtype)) {
    TESSERA_EXPECT(from == std::floor(from) && step == std::floor(step), "arange: ", dtype,
                   " has no fractions, as of ", from, " and ", step);
    const double last = from + step * static_cast<double>(count - 1);
    expect_whole("arange", dtype, std::min(from, last), std::max(from, last));
  }
  return steps(from, step, count, dtype, device);
}

Tensor linspace(double first, double last, std::int64_t count, DType dtype, const Device& device,
                Caller at) {
  const CallSite site("linspace", at);
  const double step = count > 1 ? (last - first) / static_cast<double>(count - 1) : 0;
  return steps(first, step, count, dtype, device);
}

Tensor eye(std::int64_t rows, DType dtype, const Device& device, Caller at) {
  const CallSite site("eye", at);
  return eye(rows, rows, dtype, device);
}
Tensor eye(std::int64_t rows, std::int64_t cols, DType dtype, const Device& device, Caller at) {
  const CallSite site("eye", at);
  Tensor out = Tensor::zeros({rows, cols}, dtype, device);
  raw::fill(raw::diagonal(out, 0, 0, 1), 1);
  return out;
}

Tensor one_hot(const Tensor& index, std::int64_t classes, DType dtype, Caller at) {
  const CallSite site("one_hot", at);
  TESSERA_EXPECT(index.dtype() == i32 || index.dtype() == i64, "one_hot: the index is ",
                 index.dtype(), ", expected i32 or i64");
  Shape shape = index.shape();
  shape.push_back(1);
  const Tensor each = Tensor::arange(classes, index.dtype(), index.device());
  return raw::cast(raw::binary(Binary::eq, raw::reshape(index, shape), each), dtype);
}

Tensor randn(const Shape& shape, std::uint64_t key, const Device& device, Caller at) {
  const CallSite site("randn", at);
  return Tensor::normal(shape, 0, 1, key, f32, device);
}

Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, std::uint64_t key,
               DType dtype, const Device& device, Caller at) {
  const CallSite site("randint", at);
  TESSERA_EXPECT(low < high && high - low <= std::int64_t{1} << 48, "randint: [", low, ", ", high,
                 ") holds no whole number, or more than 2^48");
  expect_whole("randint", dtype, static_cast<double>(low), static_cast<double>(high - 1));
  const Tensor scaled = raw::mul(fine_uniform(shape, key, device), static_cast<double>(high - low));
  const Tensor whole = raw::unary(raw::Unary::floor, scaled);
  return raw::cast(raw::binary(Binary::add, whole, static_cast<double>(low)), dtype);
}

Tensor bernoulli(double p, const Shape& shape, std::uint64_t key, DType dtype, const Device& device,
                 Caller at) {
  const CallSite site("bernoulli", at);
  TESSERA_EXPECT(p >= 0 && p <= 1, "bernoulli: p is ", p, ", expected 0 to 1");
  return raw::cast(raw::binary(Binary::lt, fine_uniform(shape, key, device), p), dtype);
}
Tensor bernoulli(const Tensor& p, std::uint64_t key, Caller at) {
  const CallSite site("bernoulli", at);
  const Tensor drawn = fine_uniform(p.shape(), key, p.device());
  return raw::cast(raw::binary(Binary::lt, drawn, raw::cast(p, f64)), p.dtype());
}

Tensor randperm(std::int64_t n, std::uint64_t key, const Device& device, Caller at) {
  const CallSite site("randperm", at);
  return raw::argsort(fine_uniform({n}, key, device), 0);
}

// The largest of weight / E, E exponential, is each position in proportion to its weight, and the
// `count` largest are draws without replacement.
Tensor multinomial(const Tensor& weights, std::int64_t count, Replacement replacement,
                   std::uint64_t key, Caller at) {
  const CallSite site("multinomial", at);
  TESSERA_EXPECT(weights.ndim() >= 1 && is_floating(weights.dtype()),
                 "multinomial: the weights are ", weights.shape(), " of ", weights.dtype(),
                 "; expected floating rows");
  const std::int64_t n = weights.shape().back();
  TESSERA_EXPECT(count >= 0 && (replacement == Replacement::yes ? n > 0 : count <= n),
                 "multinomial: ", count, " draws from ", n,
                 " positions; draw fewer, or with replacement");
  Shape shape = weights.shape();
  Tensor w = raw::cast(weights, f64);
  if (replacement == Replacement::yes) {  // a race for each draw
    Shape raised = shape.with(shape.ndim() - 1, 1);
    raised.push_back(n);
    w = raw::reshape(w, raised);
    shape = raised.with(weights.ndim() - 1, count);
  }
  const Tensor waits = raw::neg(raw::log(fine_uniform(shape, key, weights.device())));
  const Tensor speed = raw::binary(Binary::div, w, waits);
  if (replacement == Replacement::yes) return raw::reduce(raw::Reduction::argmax, speed, -1);
  return raw::contiguous(raw::slice(raw::argsort(speed, -1, Order::descending), -1, 0, count));
}

}  // namespace tessera
