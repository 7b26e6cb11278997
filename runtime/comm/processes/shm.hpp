// Ranks as processes of one host that see each other's memory: where they meet, and the
// communicator that pulls through it as threads do. Knows nothing of who made the memory: see
// bootstrap.hpp.
//
//   rank 0  ──publish──┐ barrier ┌──pull──┐ barrier ┌── next operation
//   rank 1  ───publish─┘         └──pull──┘         └── next operation
#pragma once

#include <array>
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
#include "runtime/comm/processes/process_id.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

enum class BarrierKind : std::uint8_t { collective, allocate, recovery, shutdown };
// The last two are for ranks of a world that has failed, too.
constexpr bool outlives_failure(BarrierKind kind) { return kind >= BarrierKind::recovery; }

// One rank's part of a barrier, which has an order of its own. All but `reached` is used of the
// first rank's alone.
struct BarrierPart {
  alignas(64) std::atomic<std::uint32_t> round{0};    // rounds that are complete
  std::atomic<std::uint32_t> arrived{0};              // at the next one
  std::atomic<std::uint32_t> sleepers{0};             // on `round`
  alignas(64) std::atomic<std::uint32_t> reached{0};  // rounds that the rank has come to
  std::atomic<std::uint64_t> committed{0};  // of a collective: the last call of the group that it
                                            // comes to, should it fail
  std::atomic<bool> is_broken{false};       // of the first rank: some rank has given up a round
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
};

// What one rank puts where all of its group can see it. Lies in shared memory, made there by its
// rank.
struct GroupSegment {
  static constexpr int kRoles = 3;
  struct Role {
    BarrierPart barrier;
    Published published;
    alignas(64) std::byte staging[kStagedBytes];
  };

  Role roles[kRoles];
  BarrierPart allocate;
  FlightRecorder calls;
};

// The same for all of its world.
struct Segment {
  BarrierPart recovery, shutdown;
  alignas(64) std::atomic<std::uint32_t> left{0};  // the rank submits no more
  int rank = 0;                                    // in the world; here they count by host
  ProcessId process;
  std::atomic<std::uint64_t> beat{0};       // grows while the process lives
  double contributed[World::kAgreed] = {};  // to a recovery
  std::atomic<bool> has_halted{false};      // the rank comes to what it has committed, and no more
  // Rank 0's only: whether the world is aborted, or a rank of it has halted, and why.
  enum : std::uint32_t { kFine, kWriting, kHalted, kAborted };
  std::atomic<std::uint32_t> state{kFine};
  std::atomic<std::int32_t> lost{-1};  // a rank whose process has died or has stopped
  // `reason` is that a rank is lost or late, so waiting ranks throw LostRank. False where a rank
  // failed first, also when another is lost afterwards.
  std::atomic<bool> lost_is_reason{false};
  char reason[2048] = {};
};

// Memory of all ranks as this rank has mapped it: the same offset from each of `bases`, by rank.
struct SharedMapping {
  std::uint64_t number;  // the same on every rank
  std::int64_t bytes;    // of each rank
  std::vector<std::byte*> bases;
};

// Those who meet at a barrier, counted from 0, in this rank's address space.
struct Party {
  std::vector<BarrierPart*> parts;
  std::vector<int> on_host;  // which of the ranks of the host they are
  std::size_t own = 0;
};

class ShmGroup;

// One rank's view of the segments of its host. Threads: any.
class ShmWorld {
 public:
  // `segments` are all ranks', in this rank's address space.
  ShmWorld(std::vector<Segment*> segments, int rank, double timeout_s);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(segments_.size()); }
  Segment& segment(int rank) const { return *segments_[static_cast<std::size_t>(rank)]; }
  // Ranks are counted on this host; this is what the world calls them.
  int name_of(int rank) const { return segment(rank).rank; }
  // Where a rank of this host is among all communicators of the world.
  std::string position(int rank) const;

  // Blocks until all are at the barrier. One thread per rank and barrier. `what` is for messages.
  // `call`: of a collective, its number in the group. Throws: CommError when the world is aborted,
  // or a rank has halted that has not committed the call, and at `allocate`, which is no recorded
  // call, when a rank that is missing has ended or does not come in time. `shutdown` waits for as
  // long as the world is fine; if it is not, 5 s, or not at all for a rank that is lost.
  void barrier(const Party& party, BarrierKind kind, const char* what, std::uint64_t call = 0);
  void shut_down() { barrier(shutdown_, BarrierKind::shutdown, "end"); }
  // Everyone who is at a barrier, or comes to one, gets a CommError with `reason`. The first reason
  // wins.
  void abort(const std::string& reason) noexcept { abort_because(reason, -1, false); }
  // This rank has failed: they get it for what it has not committed.
  void halt(const std::string& reason) noexcept;
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
  bool is_aborted() const;     // or a rank has halted
  bool is_final() const;       // no rank alone
  bool has_lost() const;       // and a rank is gone
  std::string reason() const;  // empty while the world is fine
  // All ranks meet after a failure, their devices idle, and are fine afterwards; each of `largest`
  // becomes the largest of all ranks.  Throws: CommError when a rank has ended or is lost.
  // `clear` runs on every rank while no rank is in a collective.
  void rejoin(std::span<double> largest, const std::function<void()>& clear);
  // For transports whose peers may need this rank to finish what they can't give up: called all the
  // while a rank waits in the last two states.
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }
  // Throws: CommError with the reason once the world is aborted.
  void expect_fine() const {
    if (is_aborted()) give_up();
  }
  // Whether the rank waits for the others at the end, or has seen them there.
  bool is_at_end(int rank) const;
  // This rank comes to no barrier any more but `shutdown`.
  void leave() noexcept;

  // The first one is that of all ranks. `f` must not make any.
  void add(ShmGroup& group);
  template <class F>
  void for_each_group(const F& f) const {
    const std::lock_guard lock(groups_mutex_);
    for (ShmGroup* group : groups_) f(*group);
  }

 private:
  void abort_because(const std::string& reason, int lost, bool lost_is_reason) noexcept;
  bool explain(const std::string& reason, int lost, bool lost_is_reason) noexcept;
  bool gives_up(const Party& party, BarrierKind kind, std::uint64_t call) const;
  std::chrono::milliseconds shutdown_patience() const;
  bool withdraw(std::uint32_t round);
  bool sleep(const Party& party, BarrierKind kind, std::uint32_t round, std::uint64_t call);
  void look_around(const Party& party, BarrierKind kind, std::uint32_t round, const char* what,
                   bool is_late);
  void wake_all() noexcept;
  [[noreturn]] void give_up() const;

  std::vector<Segment*> segments_;
  Party recovery_, shutdown_;
  const int rank_;
  const double timeout_s_;
  std::function<void()> progress_;
  mutable std::recursive_mutex groups_mutex_;  // who looks at groups may abort, which wakes them
  std::vector<ShmGroup*> groups_;
};

// One rank's view of a group's segments on its host, and of the memory that all of these ranks can
// read. Ranks count by their order here. Threads: any.
class ShmGroup {
 public:
  // `on_host` says which ranks of the host they are.
  ShmGroup(ShmWorld& world, std::vector<GroupSegment*> segments, std::vector<int> on_host,
           int rank);

  ShmWorld& world() const noexcept { return world_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(segments_.size()); }
  GroupSegment::Role& role(int rank, int number) const {
    return segments_[static_cast<std::size_t>(rank)]->roles[number];
  }
  FlightRecorder& recorder(int rank) const {
    return segments_[static_cast<std::size_t>(rank)]->calls;
  }
  const std::vector<const FlightRecorder*>& recorders() const noexcept { return recorders_; }
  std::span<const int> names() const noexcept { return names_; }  // as the world counts them
  // A rank's number on the host.
  int on_host(int rank) const { return allocate_.on_host[static_cast<std::size_t>(rank)]; }

  void meet(int role, const char* what, std::uint64_t call) {
    world_.barrier(roles_[static_cast<std::size_t>(role)], BarrierKind::collective, what, call);
  }
  void commit() const noexcept;
  void meet_to_allocate(const char* why) { world_.barrier(allocate_, BarrierKind::allocate, why); }
  // Puts the barriers back to where all had last come together.
  void rearm();
  void wake_all() const noexcept;

  void add(SharedMapping mapping);
  void remove(std::uint64_t number);
  // The mapping that holds [data, data + bytes) of this rank, or null. Stays until it is removed.
  const SharedMapping* find(const void* data, std::int64_t bytes) const;
  // The one of this number, which is there.
  const SharedMapping& mapping(std::uint64_t number) const;

 private:
  ShmWorld& world_;
  const std::vector<GroupSegment*> segments_;
  const int rank_;
  std::array<Party, GroupSegment::kRoles> roles_;
  Party allocate_;
  std::vector<const FlightRecorder*> recorders_;
  std::vector<int> names_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<SharedMapping>> mappings_;
};

std::unique_ptr<Communicator> make_shm_communicator(DeviceContext& context, ShmGroup& group,
                                                    int number, const GroupSeat& seat,
                                                    std::string_view role, StreamId stream);

}  // namespace tessera::comm
