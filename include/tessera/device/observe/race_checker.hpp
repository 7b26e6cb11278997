// Finds what may go wrong on some schedule, from one run on any schedule. A race is two operations
// that touch the same bytes, at least one of them writing, while nothing orders them.
//
//   auto checker = RaceChecker::make();
//   checker->watch(device.context());       // or WorldOptions::race_checker
//   ...
//   checker->summary();                     // "race checker: 1204 operations, 0 races"
//
// Note [What the race checker knows]
// It has clocks of its own, fed by what the executors put into their streams. It never reads those
// of DeviceContext. An event stands for what it means on every device: all work submitted to its
// stream before, and all that this had waited for. Bytes are compared as ranges, through free and
// reuse. Memory that is handed out to a stream counts as written there, so every last touch of its
// former life must be ordered before. A collective joins the ranks of a process: what follows it on
// any rank follows what led to it on all. Only the order of the host's calls matters, so a report
// comes at any speed of the device, on any executor.
// Source: vector clocks and last accesses as in Flanagan and Freund, "FastTrack", PLDI 2009.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/device/observer.hpp"

namespace tessera {

class DeviceContext;

enum class RaceKind : std::uint8_t {
  conflict,        // two operations touch the same bytes
  reuse,           // bytes are handed out while an operation of their former life may touch them
  use_after_free,  // an operation was submitted after its bytes were given back
  early_release,   // bytes go back to the system while an operation may touch them
};

// One side of a race: an operation of a stream, the host, or an allocation.
struct RaceSide {
  std::string operation;  // its name; "the host", or "the allocation"
  int rank = 0;
  std::string stream;  // "host" for the host
  Tick tick = 0;       // of the stream; an allocation comes after it
  AccessMode mode = AccessMode::read;
};

struct Race {
  RaceKind kind = RaceKind::conflict;
  RaceSide earlier, later;  // in the order of submission
  std::string owner;        // the ledger's name of the bytes; empty if nobody has announced them
  std::int64_t bytes = 0;   // of the first range in conflict
  // The edge that would order them: "make compute wait for gather's tick 17, the end of
  // 'all_gather'".
  std::string missing_edge;

  std::string to_string() const;  // one line
};

// Threads: the host threads of all ranks that it watches.
class RaceChecker {
 public:
  static std::shared_ptr<RaceChecker> make();
  virtual ~RaceChecker() = default;

  // Watches a device, from here to its end. Requires: the device is idle.
  virtual void watch(DeviceContext& context) = 0;

  virtual std::uint64_t operations() const = 0;
  // The number of races that differ in operations, streams, owner or kind; and the first 100 of
  // them.
  virtual std::uint64_t race_count() const = 0;
  virtual std::vector<Race> races() const = 0;

  // "race checker: N operations, N races".
  std::string summary() const;
};

}  // namespace tessera
