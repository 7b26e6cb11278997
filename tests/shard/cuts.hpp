// A step that fails at a place of the test's.
#pragma once

#include <stdexcept>
#include <string_view>

#include "tessera/device/device_context.hpp"

namespace tessera::testing {

// Throws at the n-th operation of a name that is submitted; of any, where there is none.
class Cuts final : public Observer {
 public:
  explicit Cuts(int n, std::string_view name = "") : left(n), name_(name) {}
  void launched(StreamId, Tick, const Op& op) override {
    if ((name_.empty() || name_ == op.name) && --left == 0) throw std::runtime_error("cut");
  }
  int left;

 private:
  std::string_view name_;
};

}  // namespace tessera::testing
