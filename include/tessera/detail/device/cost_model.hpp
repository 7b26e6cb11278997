// How long operations take on a machine that need not be here: the clock of the `virtual` executor.
//
//   kernel       │ launch_seconds │ the longer of flops and bytes │      the roofline of a machine
//   collective   │ wire latency   │ wire_bytes                    │      alpha + beta * bytes
//
// Every communicator has a wire of its own with the whole bandwidth, unless there is a Machine,
// whose links a rank's collectives share. Numbers are given, not guessed: what is left out takes no
// time. Roofline: Williams, Waterman, Patterson, "Roofline: an insightful visual performance
// model", CACM 2009; alpha-beta: Hockney, Parallel Computing 1994.
//
// A Machine prices operations by their shape, and its ranks by where they are; see machine.hpp.
#pragma once

#include <limits>

#include "tessera/device/cost.hpp"

namespace tessera {

struct Machine;

struct CostModel {
  static constexpr double kNoTime = std::numeric_limits<double>::infinity();

  double flops_per_second = kNoTime;       // of a rank's compute
  double bytes_per_second = kNoTime;       // of a rank's memory, read and written
  double launch_seconds = 0;               // on the device, before a kernel begins
  double wire_latency_seconds = 0;         // of a collective, whatever its size
  double wire_bytes_per_second = kNoTime;  // of a rank, sent and received together
  double host_seconds = 0;                 // for which the host is busy with one launch
  // Prices all operations in place of the numbers above, unless null. Outlives the device.
  const Machine* machine = nullptr;

  // How long a stream is busy with an operation, without a look at `machine`.
  constexpr double seconds(const Cost& cost) const {
    if (cost.wire_bytes > 0) return wire_latency_seconds + cost.wire_bytes / wire_bytes_per_second;
    const double compute = cost.flops / flops_per_second, memory = cost.bytes / bytes_per_second;
    return launch_seconds + (compute > memory ? compute : memory);
  }
  bool operator==(const CostModel&) const = default;
};

static_assert(CostModel{}.seconds({.flops = 1e9, .bytes = 1e9, .wire_bytes = 1e9}) == 0);
static_assert(CostModel{.flops_per_second = 2, .bytes_per_second = 4}.seconds({.flops = 6,
                                                                               .bytes = 8}) == 3);

}  // namespace tessera
