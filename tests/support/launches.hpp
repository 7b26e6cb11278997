// How often a device is asked for an operation, by the operation's name, while this lives.
//
//   const Launches launches(world.device());
//   model.loss(x, y).backward();
//   CHECK(launches.of("reduce_scatter ") == 3);
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "tessera/device/device_context.hpp"
#include "tessera/device/observer.hpp"

namespace tessera::testing {

class Launches final : public Observer {
 public:
  explicit Launches(const Device& device) : device_(device) {
    device_.synchronize();  // nobody looks at its list of observers
    device_.context().add_observer(*this);
  }
  Launches(const Launches&) = delete;
  ~Launches() override {
    device_.synchronize();
    device_.context().remove_observer(*this);
  }
  void launched(StreamId, Tick, const Op& op) override { ++counts_[op.name]; }

  const std::map<std::string, std::uint64_t>& counts() const { return counts_; }
  // Of all operations whose names begin with `prefix`.
  std::uint64_t of(std::string_view prefix) const {
    std::uint64_t sum = 0;
    for (const auto& [name, count] : counts_)
      if (name.starts_with(prefix)) sum += count;
    return sum;
  }

 private:
  Device device_;
  std::map<std::string, std::uint64_t> counts_;
};

}  // namespace tessera::testing
