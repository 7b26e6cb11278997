// Lesson 50: an operation of your own, with its derivative, from outside the library.
//
//   softplus(x) = log(1 + e^x)          its derivative is 1 / (1 + e^-x)
//
// Three steps make it a full member:
//   launch   a body on the device's compute stream, with what it reads and writes
//   record   how a gradient of the result becomes a gradient of the input
//   check    the derivative against finite differences
//
// The body may run later, on another thread. So it holds plain pointers and owns nothing: at most
// 128 bytes, copied as they are. The accesses are what keeps the memory behind those pointers
// from being reused: the launch notes in them who used a buffer last, and the allocator reads it.
//
// PyTorch: the three steps are TORCH_LIBRARY for the kernel, torch.autograd.Function for the
// derivative, and gradcheck. A kernel there does not declare what it touches, so one that runs on a
// stream of its own must call `record_stream` for each of its tensors.
#include <algorithm>
#include <cmath>
#include <iostream>

#include "tessera/autograd/gradcheck.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/device/workers.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;
using ts::autograd::Gradients;
using ts::autograd::Saved;

// out[i] = f(in[i]) over contiguous tensors of T.
template <class T, class F>
static void launch_map(const char* name, const ts::Tensor& out, const ts::Tensor& in, F f) {
  if (out.numel() == 0 || out.device().is_meta()) return;  // nothing to run
  const ts::Access accesses[] = {in.access(AccessMode::read), out.access(AccessMode::write)};
  out.device().compute().launch(
      {.name = name, .accesses = accesses},
      [f, n = out.numel(), to = reinterpret_cast<T*>(out.data()),
       from = reinterpret_cast<const T*>(in.data())](ts::Exec& exec) {
        constexpr std::int64_t kGrain = 4096;  // tasks are cut by size alone: bits do not depend
        ts::parallel_for(exec, (n + kGrain - 1) / kGrain, [&](std::int64_t task) {  // on threads
          for (std::int64_t i = task * kGrain; i < std::min(n, (task + 1) * kGrain); ++i)
            to[i] = f(from[i]);
        });
      });
}

// f over a tensor of f32 or f64, whatever its layout.
template <class F>
static ts::Tensor map(const char* name, const ts::Tensor& x, F f) {
  TESSERA_EXPECT(x.dtype() == ts::f32 || x.dtype() == ts::f64, name, ": the tensor is ", x.dtype(),
                 ", expected f32 or f64; cast it first");
  const ts::Tensor in = ts::raw::contiguous(x);
  ts::Tensor out = ts::Tensor::empty(x.shape(), x.dtype(), x.device());
  x.dtype() == ts::f32 ? launch_map<float>(name, out, in, f) : launch_map<double>(name, out, in, f);
  return out;
}

static ts::Tensor softplus(const ts::Tensor& x) {
  // Without overflow for large x: log(1 + e^x) = max(x, 0) + log(1 + e^-|x|).
  ts::Tensor y = map("softplus", x, [](auto v) {
    return std::max(v, decltype(v)(0)) + std::log1p(std::exp(-std::abs(v)));
  });
  // `Saved` keeps x for backward, and only then; backward itself is made of raw operations.
  return ts::autograd::record(
      "softplus", {x}, y, [x = Saved(x)](const ts::Tensor& g, Gradients& out) {
        const auto slope = [](auto v) { return 1 / (1 + std::exp(-v)); };
        out.set(0, ts::raw::mul(g, map("softplus_backward", x.get(), slope)));
      });
}

int main() {
  const ts::Device device = ts::Device::cpu({.threads = 2});
  ts::Tensor x = ts::Tensor::from({-100, -1, 0, 1, 100}, {5}, device).require_grad();
  const ts::Tensor y = softplus(x);
  sum(y * 2.0).backward();  // it mixes with every other operation
  std::cout << "1. softplus of " << x << "\n   is          " << y << "\n   its slope   "
            << x.grad() * 0.5 << '\n';
  const std::vector<float> values = y.to_vector<float>(), slopes = x.grad().to_vector<float>();
  CHECK(std::abs(values[2] - std::log(2.f)) < 1e-6f && values[4] == 100);
  CHECK(slopes[2] == 1 && slopes[4] == 2 && slopes[0] < 1e-40f);

  // Strided, broadcast and empty inputs, in f64, where differences are precise enough to compare.
  const auto good = [](const std::vector<ts::Tensor>& v) {
    return softplus(transpose(v[0], 0, 1)) * softplus(expand(v[1], {3, 2})) + sum(softplus(v[2]));
  };
  const std::vector<ts::Tensor> inputs{ts::Tensor::normal({2, 3}, 0, 2, 1, ts::f64, device),
                                       ts::Tensor::normal({2}, 0, 2, 2, ts::f64, device),
                                       ts::Tensor::zeros({0, 4}, ts::f64, device)};
  const auto report = ts::gradcheck(good, inputs);
  std::cout << "2. Its derivative " << (report.passed ? "agrees with" : "differs from")
            << " finite differences\n";
  CHECK(report.passed);

  // A slip, as it would be found: e^x where e^-x belongs.
  const auto slip = [](const std::vector<ts::Tensor>& v) {
    return ts::autograd::record("slip", {v[0]}, softplus(v[0].detach()),
                                [x = Saved(v[0])](const ts::Tensor& g, Gradients& out) {
                                  out.set(0, ts::raw::mul(g, map("slope", x.get(), [](auto t) {
                                                            return 1 / (1 + std::exp(t));
                                                          })));
                                });
  };
  const auto caught = ts::gradcheck(slip, inputs);
  std::cout << "3. A wrong one: " << caught.message << '\n';
  CHECK(!caught.passed);
}
