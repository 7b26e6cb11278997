// An operation of several results: a node for each, which hands its gradient on to one that they
// have in common, and that runs behind them.
//
//   inputs ─── common node ──┬── result 0 ───
//              "token" [0]   └── result 1 ───
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::autograd {

class JointResults {
 public:
  // Gives `results` their history behind `token`, whose node is the common one. A result that is
  // not floating has none.
  static void record(const std::shared_ptr<JointResults>& joint, const char* name,
                     const Tensor& token, std::span<Tensor> results) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!is_floating(results[i].dtype())) continue;
      results[i] = autograd::record(
          name, {token}, results[i],
          [joint, i, count = results.size()](const Tensor& gradient, Gradients& to) {
            if (joint->gradients_.empty()) {
              joint->gradients_.resize(count);
              to.set(0, Tensor::empty({0}, f32, gradient.device()));
            }
            Tensor& held = joint->gradients_[i];
            held = held.defined() ? raw::add(held, gradient) : gradient;
          });
    }
  }
  // Those that have arrived, for the common node; undefined for results that nobody has used.
  std::vector<Tensor> take() { return std::exchange(gradients_, {}); }

 private:
  std::vector<Tensor> gradients_;  // empty for none
};

}  // namespace tessera::autograd
