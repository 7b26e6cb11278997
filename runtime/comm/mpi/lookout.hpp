// What a process of a world looks out for: peers of its host that died, stopped or ended early,
// collectives that take too long, ranks that went separate ways. What it finds ends the world for
// all, with a reason that names the rank.
//
//   each process   beat ─ look ─ 100 ms ─ beat ─ look ─ ...    its own counter grows, peers' must
//   killed         the kernel says so at once (pidfd)
//   stopped        its counter stands still for heartbeat_timeout_seconds
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "runtime/comm/mpi/shared.hpp"
#include "runtime/comm/watch.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class Lookout {
 public:
  // Every rank of the host has made its segment.
  Lookout(SharedWorld& world, const WorldOptions& options);
  ~Lookout();
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void open_peers();
  void look(int ready);
  void look_for_silence();
  void look_for_late_calls();
  void look_for_partings();

  SharedWorld& world_;
  const double timeout_s_, heartbeat_s_;
  std::vector<int> pidfds_;  // by rank on the host; -1 where there is none
  std::vector<std::uint64_t> beats_;
  std::vector<double> silent_s_;
  std::vector<std::uint64_t> parted_;  // the call in which a peer differed in the last look
  Clock::time_point last_look_ = Clock::now();
  std::unique_ptr<Watch> watch_;  // last: its thread uses the rest
};

}  // namespace tessera::comm
