// Observers of the door of device.hpp: trace, race checker, profiler ranges. Nothing else knows
// that they exist.
//
// There are two accounts of a program. The first group of calls says what the host asked for. The
// second says what the executor put into its streams. They differ if an executor is at fault, and a
// checker that listens to the second sees it.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/device/event.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

class CollectiveBarrier;

// Bytes [begin, end) change hands, or the host touches them. The layers that own memory tell it.
struct MemoryEvent {
  enum class Kind : std::uint8_t {
    acquired,    // from the system: nobody has touched them
    claimed,     // about to be handed out: the waits in between are its gate
    handed_out,  // to `stream`, or to the host
    given_back,  // for reuse; work already submitted may still touch them
    released,    // to the system: nobody may touch them any more
    host_reads,
    host_writes,
  };
  Kind kind = Kind::acquired;
  const void* begin = nullptr;
  const void* end = nullptr;
  std::string_view owner{};  // the ledger's name; valid during the call
  StreamId stream = StreamId::compute;
  bool to_host = false;  // handed out to the host instead of to `stream`
};

class Observer {
 public:
  virtual ~Observer() = default;

  // What the host asked for, on the rank's host thread, in program order. An exception ends the
  // call that it came from. One from `memory`, which tells of the past, ends the next blocking
  // call.
  virtual void launched(StreamId, Tick, const Op&) {}
  virtual void recorded(const Event&) {}
  virtual void waited(StreamId, const Event&) {}
  virtual void blocked(const Event&) {}
  virtual void memory(const MemoryEvent&) {}

  // What the executor has put into its streams, on the same thread. A launch comes just before its
  // body can start, a wait when the stream has it, a block when the host is through. These can't
  // refuse, because other observers may have heard of it already.
  virtual void executor_launched(StreamId, Tick, const Op&, const CollectiveBarrier*) noexcept {}
  virtual void executor_recorded(const Event&) noexcept {}
  virtual void executor_waited(StreamId, const Event&) noexcept {}
  virtual void executor_blocked(const Event&) noexcept {}

  // The executor at work, on the thread that runs the body.
  virtual void started(StreamId, Tick, const char* /*name*/) {}
  virtual void finished(StreamId, Tick, const char* /*name*/) {}

  // A failure is over and the device goes on. Nothing submitted before is in flight.
  virtual void reset() {}
  // The device ends, idle and without memory. This is the last call.
  virtual void ended() {}
};

// Observers of one device, in the order in which they were added. Not owned.
using Observers = std::vector<Observer*>;

}  // namespace tessera
