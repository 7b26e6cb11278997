// What a process of a world looks out for: peers of its host that died, stopped or ended early,
// collectives that take too long, ranks that went separate ways. What it finds ends the world for
// all, with a reason that names the rank.
//
//   each process   beat ─ look ─ 100 ms ─ beat ─ look ─ ...    its own counter grows, peers' must
//   killed         the kernel says so at once (pidfd)
//   stopped        its counter stands still for heartbeat_timeout_seconds
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/comm/poll_thread.hpp"
#include "runtime/comm/processes/shm.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class PeerMonitor {
 public:
  // Every rank of the host has made its segment. `look_beyond` looks after what is on other hosts.
  PeerMonitor(ShmWorld& world, const WorldOptions& options, std::function<void()> look_beyond);
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void open_peers();
  void look(int ready);
  void look_for_silence();
  void look_for_late_calls();
  void look_for_late_calls(const ShmGroup& group);
  void look_for_partings();

  ShmWorld& world_;
  const double timeout_s_, heartbeat_s_;
  const std::function<void()> look_beyond_;
  std::vector<int> pidfds_;  // by rank on the host; -1 where there is none
  std::vector<std::uint64_t> beats_;
  std::vector<double> silent_s_;
  // By group and peer: the call in which they differed in the last look.
  std::map<std::pair<const ShmGroup*, int>, std::uint64_t> parted_;
  Clock::time_point last_look_ = Clock::now();
  std::unique_ptr<PollThread> poll_thread_;  // last: its thread uses the rest
};

}  // namespace tessera::comm
