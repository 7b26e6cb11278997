// What the tests of backward passes share: leaves, and nodes and regions that write down when they
// run.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/autograd/helpers.hpp"

namespace tessera::testing {

using Log = std::vector<std::string>;

inline Tensor leaf(const std::vector<float>& values, const Device& device) {
  Tensor x = Tensor::from(values, {static_cast<std::int64_t>(values.size())}, device);
  return x.require_grad();
}

inline std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

// Identity that writes its name when its backward runs.
inline Tensor logged(const Tensor& x, const char* name, Log& log) {
  return autograd::record(name, {x}, raw::mul(x, 1),
                          [name, &log](const Tensor& g, autograd::Gradients& out) {
                            log.push_back(name);
                            out.set(0, g);
                          });
}

struct LoggedRegion final : autograd::Region {
  LoggedRegion(std::string name, Log& log) : name(std::move(name)), log(log) {}
  void on_backward_begin() override { log.push_back("begin " + name); }
  void on_backward_end() override { log.push_back("end " + name); }
  std::string name;
  Log& log;
};

}  // namespace tessera::testing
