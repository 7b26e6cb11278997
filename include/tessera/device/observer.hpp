// Those who watch the door: trace, race checker, flight recorder. Nothing else knows that they
// exist.
#pragma once

#include <vector>

#include "tessera/device/event.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

class Observer {
 public:
  virtual ~Observer() = default;

  // The host program: called on the rank's host thread, in its order.
  virtual void launched(StreamId, Tick, const Op&) {}
  virtual void recorded(const Event&) {}
  virtual void waited(StreamId, const Event&) {}
  virtual void blocked(const Event&) {}

  // The executor: called on whatever thread runs the body.
  virtual void started(StreamId, Tick, const char* /*name*/) {}
  virtual void finished(StreamId, Tick, const char* /*name*/) {}
};

// Observers of one device, in the order in which they were added. Not owned.
using Observers = std::vector<Observer*>;

}  // namespace tessera
