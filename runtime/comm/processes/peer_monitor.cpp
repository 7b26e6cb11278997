#include "runtime/comm/processes/peer_monitor.hpp"

#include <unistd.h>

#include <algorithm>

#include "runtime/comm/agreement.hpp"
#include "tessera/base/error.hpp"

namespace tessera::comm {

PeerMonitor::PeerMonitor(ShmWorld& world, const WorldOptions& options,
                         std::function<void()> look_beyond)
    : world_(world),
      timeout_s_(options.timeout_seconds),
      heartbeat_s_(options.heartbeat_timeout_seconds),
      look_beyond_(std::move(look_beyond)),
      beats_(static_cast<std::size_t>(world.size())),
      silent_s_(static_cast<std::size_t>(world.size())) {
  open_peers();
  poll_thread_ = std::make_unique<PollThread>(pidfds_, [this](int ready) { look(ready); });
}

PeerMonitor::~PeerMonitor() {
  poll_thread_.reset();
  for (const int fd : pidfds_)
    if (fd >= 0) close(fd);
}

// Of peers in other pid namespaces the beats must do.
void PeerMonitor::open_peers() {
  for (int r = 0; r < world_.size(); ++r)
    pidfds_.push_back(r == world_.rank() ? -1 : world_.segment(r).process.open());
}

void PeerMonitor::look(int ready) {
  if (ready >= 0) {
    if (!world_.is_at_end(ready))
      world_.abort_for_lost(ready, concat("rank ", world_.name_of(ready), " is gone: its process ",
                                          world_.segment(ready).process.pid,
                                          " has ended without a word; ", world_.position(ready)));
    return;
  }
  world_.segment(world_.rank()).beat.fetch_add(1, std::memory_order_relaxed);
  look_for_silence();
  look_beyond_();
  if (world_.is_final()) return;
  look_for_late_calls();
  if (!world_.is_aborted()) look_for_partings();
}

// Only time in which this process looked counts: after a stop of the whole job nobody is to blame.
void PeerMonitor::look_for_silence() {
  const Clock::time_point now = Clock::now();
  const double passed =
      std::min(std::chrono::duration<double>(now - last_look_).count(), 2e-3 * kLookEveryMs);
  last_look_ = now;
  for (int r = 0; r < world_.size(); ++r) {
    const auto i = static_cast<std::size_t>(r);
    const std::uint64_t beat = world_.segment(r).beat.load(std::memory_order_relaxed);
    silent_s_[i] = std::exchange(beats_[i], beat) == beat ? silent_s_[i] + passed : 0;
    if (heartbeat_s_ <= 0 || silent_s_[i] < heartbeat_s_ || r == world_.rank() ||
        world_.is_at_end(r))
      continue;
    world_.abort_for_lost(
        r,
        concat("rank ", world_.name_of(r), " shows no life for ", heartbeat_s_, " s: its process ",
               world_.segment(r).process.pid, " is stopped or starved; ", world_.position(r),
               "; to stop ranks in a debugger, set the heartbeat timeout to 0"));
    return;
  }
}

void PeerMonitor::look_for_late_calls() {
  world_.for_each_group([this](const ShmGroup& group) { look_for_late_calls(group); });
}

void PeerMonitor::look_for_late_calls(const ShmGroup& group) {
  const auto& all = group.recorders();
  for (int r = 0; r < group.size(); ++r)
    if (world_.segment(group.on_host(r)).left.load(std::memory_order_acquire))
      if (const std::string ended = describe_ended(all, group.rank(), r, group.names());
          !ended.empty())
        return world_.abort(ended);
  const std::string late = describe_late(all, group.rank(), timeout_s_, group.names());
  if (late.empty()) return;
  std::string silent;  // a rank that is stopped inside of a call has come to it
  for (int r = 0; r < world_.size(); ++r)
    if (const double s = silent_s_[static_cast<std::size_t>(r)]; s > 5e-3 * kLookEveryMs)
      silent += concat("; rank ", world_.name_of(r), " has shown no life for ", s, " s");
  world_.abort_for_late(late + silent);
}

// Ranks that differ within one communicator hear more where they meet. What still stands at the
// second look never meets.
void PeerMonitor::look_for_partings() {
  FlightEntry own, other;
  world_.for_each_group([&](const ShmGroup& group) {
    for (int r = 0; r < group.size(); ++r) {
      if (r == group.rank()) continue;
      const int low = std::min(r, group.rank()), high = std::max(r, group.rank());
      const FlightRecorder &in_low = group.recorder(low), &in_high = group.recorder(high);
      const bool differ =
          in_low.has_parted_from(in_high) && first_difference(in_low, in_high, own, other);
      const std::uint64_t call = differ ? own.seq : 0;
      if (std::exchange(parted_[{&group, r}], call) == call && call != 0)
        return world_.abort(
            describe_difference(in_low, group.names()[static_cast<std::size_t>(low)], in_high,
                                group.names()[static_cast<std::size_t>(high)]));
    }
  });
}

}  // namespace tessera::comm
