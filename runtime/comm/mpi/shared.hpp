// Ranks as processes of one host that see each other's memory: where they meet, and the
// communicator that pulls through it as threads do. Knows nothing of who made the memory; see
// mpi.cpp.
//
//   rank 0  ──publish──┐ meet ┌──pull──┐ meet ┌── next operation
//   rank 1  ───publish─┘      └──pull──┘      └── next operation
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/agreement.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// Places where all ranks meet, each in an order of its own.
enum class Place : std::uint8_t { gather, reduce, control, allocate, recovery, farewell };
inline constexpr int kPlaces = 6;
// The last two are for ranks of a world that has failed, too.
constexpr bool outlives_failure(Place place) { return place >= Place::recovery; }

// What one rank puts where all can see it. Lies in shared memory, made there by its rank.
struct Segment {
  struct At {
    // The meeting itself: only those of rank 0's segment are used.
    alignas(64) std::atomic<std::uint32_t> round{0};  // meetings that are complete
    std::atomic<std::uint32_t> arrived{0};            // at the next one
    std::atomic<std::uint32_t> sleepers{0};           // on `round`
    // The rank's own.
    alignas(64) std::atomic<std::uint32_t> reached{0};  // meetings it has come to
    Published published;
    alignas(64) std::byte staging[kStagedBytes];
  };
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

  At at[kPlaces];
  FlightRecorder calls;
  alignas(64) std::atomic<std::uint32_t> left{0};  // the rank submits no more
  int rank = 0;                                    // in the world; here they count by host
  int pid = 0;
  std::uint64_t pid_namespace = 0;      // 0: unknown
  std::atomic<std::uint64_t> beat{0};   // grows while the process lives
  double brought[World::kAgreed] = {};  // to a recovery
  // Rank 0's only: why nobody meets any more.
  enum : std::uint32_t { kFine, kWriting, kAborted };
  std::atomic<std::uint32_t> state{kFine};
  std::atomic<std::int32_t> lost{-1};       // a rank that is gone
  std::atomic<bool> lost_is_reason{false};  // or a late one, and nothing failed before
  char reason[2048] = {};
};

// One rank's view of the segments, and of the memory that all ranks can read. Threads: any.
class SharedWorld {
 public:
  // `segments` are all ranks', in this rank's address space.
  SharedWorld(std::vector<Segment*> segments, int rank, double timeout_s);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(segments_.size()); }
  Segment::At& at(int rank, Place place) const {
    return segments_[static_cast<std::size_t>(rank)]->at[static_cast<int>(place)];
  }

  Segment& segment(int rank) const { return *segments_[static_cast<std::size_t>(rank)]; }
  FlightRecorder& recorder(int rank) const { return segment(rank).calls; }
  const std::vector<const FlightRecorder*>& recorders() const noexcept { return recorders_; }
  // Ranks are counted on this host; this is what the world calls them.
  int name_of(int rank) const { return names_[static_cast<std::size_t>(rank)]; }
  std::span<const int> names() const noexcept { return names_; }

  // Sleeps until all ranks are at `place`. One thread per rank and place. `what` is for messages.
  // Throws: CommError when the world is aborted, and at `allocate`, which is no recorded call, when
  // a rank that is missing has ended or does not come in time. `farewell` waits for as long as the
  // world is fine; if it is not, 5 s, or not at all for a rank that is lost.
  void meet(Place place, const char* what);
  // Everyone who meets or will meet gets a CommError with `reason`. The first reason wins.
  void abort(const std::string& reason) noexcept { abort_because(reason, -1, false); }
  // They get a LostRank: `rank` is gone, or some do not come in time.
  void abort_for_lost(int rank, const std::string& reason) noexcept {
    abort_because(reason, rank, true);
  }
  void abort_for_late(const std::string& reason) noexcept { abort_because(reason, -1, true); }
  // What `check` throws is why the world ends: streams that wait elsewhere hear the same.
  template <class Check>
  void agree(const Check& check) {
    try {
      check();
    } catch (const CommError& error) {
      abort(error.what());
      throw;
    }
  }
  bool is_aborted() const;
  bool has_lost() const;       // and a rank is gone
  std::string reason() const;  // empty while the world is fine
  // All ranks meet after a failure, their devices idle, and are fine afterwards; each of `largest`
  // becomes the largest of all ranks.  Throws: CommError when a rank has ended or is lost.
  // `clear` runs on every rank while no rank is in a collective.
  void meet_again(std::span<double> largest, const std::function<void()>& clear);
  // For transports whose peers may need this rank to finish what they can't give up: called all the
  // while a rank waits at the last two places.
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }
  // Throws: CommError with the reason once the world is aborted.
  void expect_fine() const {
    if (is_aborted()) give_up();
  }
  // Whether the rank waits for the others at the end, or has seen them there.
  bool is_at_end(int rank) const;
  // This rank comes to no place any more but `farewell`.
  void leave() noexcept;

  // Memory at the same offset of `bases`, one for each rank.
  struct Window {
    std::uint64_t number;
    std::int64_t bytes;
    std::vector<std::byte*> bases;
  };
  void add(Window window);
  void remove(std::uint64_t number);
  // The window that holds [data, data + bytes) of this rank, or null. Stays until it is removed.
  const Window* find(const void* data, std::int64_t bytes) const;

 private:
  void abort_because(const std::string& reason, int lost, bool lost_is_reason) noexcept;
  std::chrono::milliseconds farewell_patience() const;
  bool withdraw(std::uint32_t round);
  bool sleep(Place place, std::uint32_t round);
  void look_around(Place place, std::uint32_t round, const char* what, bool is_late);
  [[noreturn]] void give_up() const;

  std::vector<Segment*> segments_;
  std::vector<const FlightRecorder*> recorders_;
  std::vector<int> names_;
  const int rank_;
  const double timeout_s_;
  std::function<void()> progress_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Window>> windows_;
};

std::unique_ptr<Communicator> make_shared_communicator(DeviceContext& context, SharedWorld& world,
                                                       Place place, std::string role,
                                                       StreamId stream);

}  // namespace tessera::comm
