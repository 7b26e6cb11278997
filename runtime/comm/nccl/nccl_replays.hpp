// The calls of a group within replays of captured steps: what of them the device has come to. A
// replay is watched as one call, by events before and behind its graph.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "tessera/comm/flight_recorder.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/event.hpp"

namespace tessera::comm {

// Threads: `add`, `launched` and `forget` the host's.
class NcclReplays {
 public:
  explicit NcclReplays(FlightRecorder& recorder) : recorder_(recorder) {}

  // The next replay has this call. Those of one replay follow each other.
  void add(std::uint64_t seq);
  void launched(const Driver& driver, const Event& before, const Event& behind);
  // At what the device has come to. What the driver refuses; null for nothing.
  const char* look();
  // The replay that has run for longer, in words; empty for none.
  std::string late(double seconds) const;
  void forget();

 private:
  struct Replay {
    std::uint64_t first = 0, last = 0;  // 0: no call
    const Driver* driver = nullptr;
    Event before{}, behind{};
    std::int64_t started_ns = 0;
  };
  using Tell = void (FlightRecorder::*)(std::uint64_t seq, StreamId stream) noexcept;
  void for_each_call(const Replay& replay, Tell tell) const;

  FlightRecorder& recorder_;
  mutable std::mutex mutex_;
  Replay next_;
  std::deque<Replay> replays_;  // from the oldest
};

}  // namespace tessera::comm
