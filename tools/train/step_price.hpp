// What a planned step takes on a machine that is not here: an observer of the plan, and the lines
// that --dry-run prints. Predictions; nothing here measures.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/detail/device/machine.hpp"

namespace tessera::train {

// One step of one rank. Seconds.
struct StepPrice {
  // All operations of one name; those of units and slices together.
  struct Operation {
    std::string name;
    std::int64_t count = 0;
    double seconds = 0;           // on its stream, with what collectives beside it cost
    Bound bound = Bound::launch;  // of most of that time
  };

  double seconds = 0;
  double exposed_seconds = 0;         // compute waits for another stream (casts, too), or its wire
  double wire_seconds = 0;            // collectives, hidden or not
  double idle_seconds = 0;            // compute waits for the host
  double copy_seconds = 0;            // of what is offloaded, between host and device
  double host_seconds = 0;            // and what the host computes of it
  std::int64_t launches = 0;          // on all streams
  std::int64_t kernels = 0;           // on the compute stream, as operations declare them
  std::vector<Operation> operations;  // the one that takes longest first
};

// Watches the steps of a plan on `virtual`.
class StepPricer {
 public:
  // Of a world that outlives it.
  StepPricer(const World& world, const Machine& machine);
  StepPricer(const StepPricer&) = delete;
  ~StepPricer();

  // The next step begins now. What was watched is forgotten.
  void begin();
  // The step that ends now.
  StepPrice end() const;

 private:
  class Watch;
  DeviceContext& device_;
  std::unique_ptr<Watch> watch_;
};

// What a step is of, for its figures.
struct PricedStep {
  const Machine* machine = nullptr;
  int ranks = 0;
  double tokens = 0, flops_per_token = 0;  // of one rank
};

// Step time, tokens a second, MFU, exposed communication, and the five operations that take
// longest.
std::string describe(const StepPrice& price, const PricedStep& step);

}  // namespace tessera::train
