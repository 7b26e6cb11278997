// The collectives of one rank in one group, over all its communicators: one sequence, a fingerprint
// that rolls over it, and the last 1,000 calls with who, what and when (NCCL's flight recorder). It
// is always on.
//
//   host    ── submit 7 ── submit 8 ── submit 9 ──▶ the order that all ranks must share
//   gather            └─ started 7 ─ done 7 ─ started 9 ...
//   reduce                      └─ started 8 ...
//
// Peers compare fingerprints before they touch a byte. They look into each other's recorders to say
// who is where.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "tessera/comm/communicator.hpp"

namespace tessera {

// One call, an entry of the flight record. For a CollectiveGroup the first item stands for all, but
// `bytes` are the whole group's. Longer texts are cut. Times are nanoseconds of the host's
// monotonic clock; 0: not yet.
struct FlightEntry {
  std::uint64_t seq = 0;          // 1 for the first call in its group, over all communicators
  std::uint64_t fingerprint = 0;  // over all calls up to this one
  std::int64_t submitted_ns = 0;
  std::int64_t count = 0;
  std::int64_t bytes = 0;  // of all items, on this rank
  Progress progress{};
  std::uint64_t around = 0;  // earlier calls of the groups around this one
  std::int32_t n_items = 0;
  std::int32_t root = 0;
  std::int32_t target = 0;
  CollectiveKind kind = CollectiveKind::barrier;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::sum;
  StreamId stream = StreamId::compute;
  char role[40] = {};  // the communicator's
  char name[48] = {};  // that the call was submitted with
  std::int64_t started_ns = 0;
  std::int64_t done_ns = 0;

  // "'unit 3' on 'gather' (all_gather of 512 x bf16)"
  std::string to_string() const;
};

// "; steps: 3; in the backward of forward 4"
std::string to_string(const Progress& progress);

// Owns no pointers, so that it may lie in memory that several processes see. Ordered: nothing. A
// reader on another thread or process gets an entry whole or not at all.
class FlightRecorder {
 public:
  static constexpr std::uint64_t kCapacity = 1000;

  FlightRecorder() noexcept;  // in place, without a pass over the entries
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Numbers and times the call, and rolls the fingerprint over it, on the rank's host thread.
  // `content` is a hash of all that ranks must agree on.
  const FlightEntry& submit(FlightEntry& call, std::uint64_t content) noexcept;
  std::uint64_t fingerprint() const noexcept { return fingerprint_; }
  // Counts a step of an optimizer over shards of the group, which all of its ranks make alike.
  void count_step() noexcept { steps_.store(steps() + 1, std::memory_order_release); }
  std::uint64_t steps() const noexcept { return steps_.load(std::memory_order_acquire); }
  // After a failure that all ranks leave behind: forgets all calls and counts from the beginning.
  // Requires: the streams are idle.
  void restart() noexcept;

  // The call's stream has reached it, and has ended it. On a GPU: these points are queued.
  void started(std::uint64_t seq, StreamId stream) noexcept;
  void done(std::uint64_t seq, StreamId stream) noexcept;

  // The `seq` of the last call that was submitted, started, done; 0: none yet. Any thread of any
  // process may ask. Streams start calls in any order, so `last_started` may be below `last_done`
  // while a call runs.
  std::uint64_t last_submitted() const noexcept { return last_.load(std::memory_order_acquire); }
  std::uint64_t last_started() const noexcept { return started_.load(std::memory_order_acquire); }
  std::uint64_t last_done() const noexcept { return done_.load(std::memory_order_acquire); }
  // The call that `stream` is in; 0: none.
  std::uint64_t running(StreamId stream) const noexcept {
    return running_[index(stream)].load(std::memory_order_acquire);
  }
  // The entry of call `seq`. False: it is not submitted yet, or overwritten by later ones.
  bool find(std::uint64_t seq, FlightEntry& out) const noexcept;
  // The fingerprint after call `seq`; 0 if `find` is false.
  std::uint64_t fingerprint_after(std::uint64_t seq) const noexcept;

  // Whether the fingerprints differ after the last call that both have submitted. It is cheap.
  bool has_parted_from(const FlightRecorder& other) const noexcept;

  // "rank 2 has submitted 41 calls, last ...; started 40, done 39"
  std::string position(int rank) const;
  // The last entries as one JSON object, oldest first, with none left out. `failure` says why it is
  // written.
  std::string to_json(int rank, int size, const std::string& failure) const;

 private:
  static constexpr std::size_t kWords = sizeof(FlightEntry) / 8;
  using Words = std::array<std::uint64_t, kWords>;  // an entry, read and written word by word
  static_assert(sizeof(FlightEntry) % 8 == 0);

  Words& entry(std::uint64_t seq) const noexcept { return entries_[seq % kCapacity]; }

  // The host thread's.
  std::uint64_t fingerprint_ = kStart;
  static constexpr std::uint64_t kStart = 0xcbf29ce484222325ull;

  alignas(64) std::atomic<std::uint64_t> last_{0};
  alignas(64) std::atomic<std::uint64_t> started_{0};
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> steps_{0};
  std::array<std::atomic<std::uint64_t>, kMaxStreams> running_{};
  mutable std::array<Words, kCapacity> entries_;  // one is read only after it has been written
};

// The first call that both have and in which they differ; false if there is none.
bool first_difference(const FlightRecorder& a, const FlightRecorder& b, FlightEntry& in_a,
                      FlightEntry& in_b);

// The clock of the entries. All processes of this host share it.
std::int64_t monotonic_ns();

// One step of a hash over words. Order counts.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
  return hash ^ (hash >> 32);
}

}  // namespace tessera
