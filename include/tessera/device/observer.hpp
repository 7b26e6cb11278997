// Those who watch the door: trace, race checker, flight recorder. Nothing else knows that they
// exist.
//
// There are two accounts of a program. The first group of calls says what the host asked for, the
// second what the executor put into its streams. They differ where an executor is at fault, and a
// checker that listens to the second sees it.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/device/event.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

class CollectiveBarrier;

// Bytes [begin, end) change hands, or the host touches them. Told by the layers that own memory.
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

  // The host program: called on the rank's host thread, in its order. An exception ends the call
  // that it came from; one from `memory`, which tells of the past, ends the next blocking call.
  virtual void launched(StreamId, Tick, const Op&) {}
  virtual void recorded(const Event&) {}
  virtual void waited(StreamId, const Event&) {}
  virtual void blocked(const Event&) {}
  virtual void memory(const MemoryEvent&) {}

  // What the executor has put into its streams, on the same thread: a launch just before its body
  // can start, a wait when the stream has it, a block when the host is through. They can't refuse,
  // or observers that have heard it would hold an account of what never was.
  virtual void executor_launched(StreamId, Tick, const Op&, const CollectiveBarrier*) noexcept {}
  virtual void executor_recorded(const Event&) noexcept {}
  virtual void executor_waited(StreamId, const Event&) noexcept {}
  virtual void executor_blocked(const Event&) noexcept {}

  // The executor at work: called on whatever thread runs the body.
  virtual void started(StreamId, Tick, const char* /*name*/) {}
  virtual void finished(StreamId, Tick, const char* /*name*/) {}

  // A failure is over and the device goes on: nothing submitted before is in flight.
  virtual void reset() {}
  // The device ends, idle and without memory: the last call.
  virtual void ended() {}
};

// Observers of one device, in the order in which they were added. Not owned.
using Observers = std::vector<Observer*>;

}  // namespace tessera
