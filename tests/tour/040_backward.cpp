// Lesson 40: backward.
//
// An operation computes its result at once and records a node: how a gradient of the result becomes
// gradients of the inputs. `backward` walks the nodes from the newest to the oldest and adds up
// what arrives at the leaves.
//
//   w ─┐                              forward ──▶
//      ├─ matmul ─ tanh ─ mean ─ loss
//   x ─┘                              ◀── backward: d loss / d w
//
// A node keeps what its derivative needs, and lets it go when it has run.
//
// PyTorch: the tape is the same, with `grad_fn` for a node, and `recompute` is called activation
// checkpointing there. PyTorch walks a GPU's nodes on a thread of its own, here the calling
// thread does, and derivatives of derivatives (`create_graph`) are not recorded here.
#include <functional>
#include <iostream>

#include "tessera/autograd/gradcheck.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

static void a_derivative(const ts::Device& device) {
  ts::Tensor x = ts::Tensor::from({1, 2, 3}, {3}, device);
  x.require_grad();  // a leaf: gradients end here
  sum(x * x * x).backward();
  std::cout << "1. The derivative of x^3 at " << x << " is " << x.grad() << '\n';
  CHECK(x.grad().to_vector<float>() == (std::vector<float>{3, 12, 27}));

  sum(x).backward();  // gradients add up until somebody clears them
  CHECK(x.grad().to_vector<float>() == (std::vector<float>{4, 13, 28}));
  x.zero_grad();
  CHECK(!x.grad().defined());
}

static void a_graph_runs_once(const ts::Device& device) {
  ts::Tensor x = ts::Tensor::ones({2}, ts::f32, device).require_grad();
  const ts::Tensor loss = sum(exp(x));
  loss.backward();
  try {
    loss.backward();
    CHECK(false);
  } catch (const ts::ContractError& error) {
    std::cout << "2. A second pass: " << error.what() << '\n';
  }
  const ts::NoGradGuard guard;  // evaluation records nothing and keeps nothing
  CHECK(!exp(x).requires_grad());
}

// Descent on w so that tanh(x w) meets a target that some w can reach.
static void learning(const ts::Device& device) {
  const ts::Tensor x = ts::Tensor::normal({32, 4}, 0, 1, /*key=*/1, ts::f32, device);
  const ts::Tensor target = tanh(matmul(x, ts::Tensor::normal({4, 1}, 0, 1, 2, ts::f32, device)));
  ts::Tensor w = ts::Tensor::zeros({4, 1}, ts::f32, device);
  double first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    ts::Tensor leaf = w.detach().require_grad();
    const ts::Tensor error = tanh(matmul(x, leaf)) - target;
    const ts::Tensor loss = mean(error * error);
    loss.backward();
    w = w - leaf.grad() * 0.5;
    last = loss.item();
    if (step == 0) first = last;
  }
  std::cout << "3. The loss fell from " << first << " to " << last << " in 100 steps\n";
  CHECK(last < first / 20);
}

// gradcheck moves every input a little, both ways, and compares.
static void checking(const ts::Device& device) {
  const auto f = [](const std::vector<ts::Tensor>& v) { return softmax(matmul(v[0], v[1])); };
  const auto report = ts::gradcheck(f, {ts::Tensor::normal({2, 3}, 0, 1, 3, ts::f64, device),
                                        ts::Tensor::normal({3, 4}, 0, 1, 4, ts::f64, device)});
  std::cout << "4. softmax(a b) against finite differences: "
            << (report.passed ? "agrees" : report.message) << '\n';
  CHECK(report.passed);
}

// What backward needs is kept until then: `recompute` keeps a function's input only and runs the
// function once more; or its input and what costs most, here the product. Planning counts the bytes
// without running anything.
static void memory_for_time() {
  const ts::Device device = ts::Device::cpu({.executor = ts::ExecutorKind::virtual_});
  const ts::Tensor w = ts::Tensor::zeros({512, 512}, ts::f32, device);
  const auto deep = [&w](const ts::Tensor& x) {
    ts::Tensor y = matmul(x, w);
    for (int i = 0; i < 8; ++i) y = tanh(y);
    return y;
  };
  using Call = std::function<ts::Tensor(const ts::Tensor&)>;
  const auto peak_of = [&](const Call& block) {
    ts::Ledger& ledger = ts::Memory::of(device).ledger();
    ts::Tensor y = ts::Tensor::zeros({512, 512}, ts::f32, device).require_grad();  // 1 MiB
    ledger.reset_peak();
    for (int i = 0; i < 8; ++i) y = block(y);
    sum(y).backward();
    return ledger.peak_bytes() >> 20;
  };
  const auto kept = peak_of(deep);
  const auto recomputed = peak_of([&](const ts::Tensor& x) { return recompute(deep, x); });
  const auto selectively =
      peak_of([&](const ts::Tensor& x) { return recompute(deep, x, {.products = 1}); });
  std::cout << "5. 8 blocks of 9 layers keep " << kept << " MiB, recomputed they keep "
            << recomputed << " MiB, or " << selectively << " MiB and multiply nothing again\n";
  CHECK(recomputed * 2 < kept);
  CHECK(recomputed < selectively);
  CHECK(selectively * 2 < kept);
}

int main() {
  const ts::Device device = ts::Device::cpu();
  a_derivative(device);
  a_graph_runs_once(device);
  learning(device);
  checking(device);
  memory_for_time();
}
