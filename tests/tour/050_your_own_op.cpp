// Lesson 50: an operation of your own, with its derivative, from outside the library.
//
//   soft_plus(x) = log(1 + e^x)          its derivative is 1 / (1 + e^-x)
//
// Three steps make it a full member:
//   map, run   a body on the device's compute stream, with what it reads and writes
//   record     how a gradient of the result becomes a gradient of the input
//   check      the derivative against finite differences
//
// `CustomOp` does around a body what every operation does: it picks the dtype, makes inputs
// contiguous, does nothing on meta, and declares the accesses, which keep the memory from being
// reused before the body has run. For it runs later, on another thread: so it holds plain numbers,
// and owns nothing.
//
// PyTorch: the steps are TORCH_LIBRARY or torch.library.custom_op for the kernel, with a "fake"
// function for shapes, torch.autograd.Function for the derivative, and gradcheck. A kernel there
// does not declare what it touches, so one that runs on a stream of its own must call
// `record_stream` for each of its tensors.
#include <algorithm>
#include <cmath>
#include <iostream>

#include "tessera/autograd/custom_op.hpp"
#include "tessera/autograd/gradcheck.hpp"
#include "tessera/autograd/ops.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::autograd::Gradients;
using ts::autograd::Saved;
using Line = std::source_location;

// Of an element: the same code for float and double, which 16-bit tensors compute in float.
static ts::Tensor soft_plus(const ts::Tensor& x, const Line& line = Line::current()) {
  const ts::CustomOp op("soft_plus", line);
  const ts::Tensor y = op.map(  // without overflow: log(1 + e^v) = max(v, 0) + log(1 + e^-|v|)
      [](auto v) { return std::max(v, decltype(v)(0)) + std::log1p(std::exp(-std::abs(v))); }, x);
  // `Saved` keeps x for backward, and only then.
  return op.record({x}, y, [op, x = Saved(x)](const ts::Tensor& g, Gradients& out) {
    out.set(0, op.map([](auto v, auto d) { return d / (1 + std::exp(-v)); }, x.get(), g));
  });
}

// Of rows: sums along the last dimension so far, out[r, c] = x[r, 0] + ... + x[r, c]. A body is
// given pointers and the number of its row.
static ts::Tensor running_sum(const ts::Tensor& x, const Line& line = Line::current()) {
  const ts::CustomOp op("running_sum", line);
  op.expect(x.ndim() == 2, "x is ", x.shape(), ", expected [rows, columns]");
  const auto add_up = [op](const ts::Tensor& in, bool backwards) {
    return op.run(
        in.shape(), in.size(0),
        [n = in.size(1), backwards]<class T>(std::int64_t row, T* out, const T* from) {
          double total = 0;
          for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t at = row * n + (backwards ? n - 1 - i : i);
            total += static_cast<double>(from[at]);
            out[at] = static_cast<T>(total);
          }
        },
        in);
  };
  return op.record({x}, add_up(x, false),
                   [add_up](const ts::Tensor& g, Gradients& out) { out.set(0, add_up(g, true)); });
}

int main() {
  const ts::Device device = ts::Device::cpu({.threads = 2});
  ts::Tensor x = ts::Tensor::from({-100, -1, 0, 1, 100}, {5}, device).require_grad();
  const ts::Tensor y = soft_plus(x);
  sum(y * 2.0).backward();  // it mixes with every other operation
  std::cout << "1. soft_plus of " << x << "\n   is          " << y << "\n   its slope   "
            << x.grad() * 0.5 << '\n';
  const std::vector<float> values = y.to_vector<float>(), slopes = x.grad().to_vector<float>();
  CHECK(std::abs(values[2] - std::log(2.f)) < 1e-6f && values[4] == 100);
  CHECK(slopes[2] == 1 && slopes[4] == 2 && slopes[0] < 1e-40f);

  // Strided, broadcast and empty inputs, in f64, where differences are precise enough to compare.
  const auto good = [](const std::vector<ts::Tensor>& v) {
    return running_sum(soft_plus(transpose(v[0], 0, 1))) * soft_plus(expand(v[1], {3, 2})) +
           sum(soft_plus(v[2]));
  };
  const std::vector<ts::Tensor> inputs{ts::Tensor::normal({2, 3}, 0, 2, 1, ts::f64, device),
                                       ts::Tensor::normal({2}, 0, 2, 2, ts::f64, device),
                                       ts::Tensor::zeros({0, 4}, ts::f64, device)};
  const auto report = ts::gradcheck(good, inputs);
  std::cout << "2. Their derivatives " << (report.passed ? "agree with" : "differ from")
            << " finite differences\n";
  CHECK(report.passed);

  // A slip, as it would be found: e^x where e^-x belongs.
  const auto slip = [](const std::vector<ts::Tensor>& v) {
    const ts::CustomOp op("slip");
    return op.record({v[0]}, soft_plus(v[0].detach()),
                     [op, x = Saved(v[0])](const ts::Tensor& g, Gradients& out) {
                       const auto slope = [](auto t, auto d) { return d / (1 + std::exp(t)); };
                       out.set(0, op.map(slope, x.get(), g));
                     });
  };
  const auto caught = ts::gradcheck(slip, inputs);
  std::cout << "3. A wrong one: " << caught.message << '\n';
  CHECK(!caught.passed);

  // Shapes alone on meta, 16 bits by way of float, and a misuse that names its line.
  const ts::Tensor small = soft_plus(ts::Tensor::zeros({2}, ts::bf16, ts::Device::meta()));
  CHECK(small.shape() == ts::Shape{2} && small.dtype() == ts::bf16);
  std::string message;
  try {
    running_sum(x);
  } catch (const ts::ContractError& error) {
    message = error.what();
  }
  std::cout << "4. A misuse: " << message << '\n';
  CHECK(message.starts_with("running_sum: x is [5], expected [rows, columns] (050_your_own_op"));
}
