// A stretch of a program's work on a GPU, to be submitted again as one: a CUDA graph.
//
//   host     begin_capture ── launch a ── launch b ── end_capture ── replay ────── replay ──▶
//   compute                   (a is kept)                            ┌ a ─────┐    ┌ a ─────┐
//   gather                                (b is kept)                └── b ───┘    └── b ───┘
//   clocks   {7, 3}        compute: 8    gather: 4                   {8, 4}        {9, 5}
//
// Inside, streams wait for each other as they were told to. A replay comes after all work before
// it, and all work after it comes after the replay, on every stream. So what was ordered with the
// kept operations is ordered with the replayed ones, and an event that is older than the capture
// is never waited for inside: the host has seen its end before. Last uses stay those of the
// capture; on the device that is right, since all comes after a replay that was submitted after it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "tessera/detail/device/collective_barrier.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

// Why a graph can't hold an operation on `stream`; null where it can.
const char* uncapturable(StreamId stream, const CollectiveBarrier* barrier);

// What a program has decided on this thread that changes what its steps do, and what a device does
// not see: which parameters are trained, an optimizer's rates, how units reduce, modes of modules.
// A captured step replays as long as it is the same.
struct Decisions {
  std::uint64_t count = 0;  // of those that may be new each time
  // Of two-way switches: an exclusive or, which a way and back leave as it was.
  std::uint64_t modes = 0;
  bool operator==(const Decisions&) const = default;
};
Decisions& decisions() noexcept;

// The graph of a capture, from the capture's begin on. Who replays it holds it, and its device may
// drop it all the same: NCCL frees a communicator only once no graph holds calls on it.
//
// Threads: any.
class CapturedGraph {
 public:
  // `graph`: the driver's.  Throws: as `get`, and the driver's is gone.
  void set(std::shared_ptr<void> graph);
  // Throws: CommError that says why, where it has been dropped.
  std::shared_ptr<void> get() const;
  // What of it runs on the device runs on, and then the driver frees it. The first reason counts.
  void drop(const std::string& why);
  std::string why_dropped() const;  // empty: it is there

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<void> graph_;
  std::string why_dropped_;
};

struct CapturedWork {
  Clock count;  // operations on each stream, by which a replay advances the clocks
  Cost cost;    // their sum
  std::shared_ptr<CapturedGraph> graph{};
};

}  // namespace tessera
