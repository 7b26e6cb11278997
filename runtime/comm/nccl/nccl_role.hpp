// One communicator of a group of World::nccl: NCCL's own, which is made at the first call, and the
// calls that are under way on the device.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/nccl/nccl_world.hpp"
#include "tessera/comm/flight_recorder.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera::comm {

// Tells the recorder what has started and is done, by events around each call, which also the watch
// thread asks. Threads: `begin` and `end` the host's.
class NcclRole {
 public:
  // `name`: "gather", "reduce" or "control".
  NcclRole(const Driver& driver, FlightRecorder& recorder, std::string_view name, StreamId stream)
      : driver_(driver), recorder_(recorder), name_(name), stream_(stream) {}
  ~NcclRole();
  NcclRole(const NcclRole&) = delete;
  NcclRole& operator=(const NcclRole&) = delete;

  const std::string& name() const noexcept { return name_; }
  StreamId stream() const noexcept { return stream_; }

  NcclWorld::Comm comm;
  bool has_windows = false;  // over the group's symmetric memory
  int openings = 0;          // of this attempt

  void begin(std::uint64_t seq, void* native_stream);
  void end(void* native_stream);
  // At what the device has come to. What the driver refuses; null for nothing.
  const char* look();
  void forget();  // all of it, and `comm`, which is gone: the streams are idle

 private:
  struct Call {
    std::uint64_t seq;
    void *started, *done;  // done: null until it is queued
    bool has_started = false;
  };
  void* take();
  void give_back(Call& call);

  const Driver& driver_;
  FlightRecorder& recorder_;
  const std::string name_;
  const StreamId stream_;
  std::mutex mutex_;
  std::deque<Call> calls_;     // from the oldest
  std::vector<void*> events_;  // free ones
};

}  // namespace tessera::comm
