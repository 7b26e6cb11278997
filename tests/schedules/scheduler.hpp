// The scheduler behind the `shuffled` executor: who holds the baton, and who gets it next.
//
//   host 0 ── submits ── blocks ──┐                                      ┌─▶ goes on
//                                 ├─ choose, run, choose, run, choose ───┤
//   host 1  (asleep in block) ────┘                                      └─▶ or this one
//
// A choice is an operation at the head of a stream, or a host whose event is complete.
// The thread that gives the baton up makes the choices and runs the operations, those of other
// ranks too, until the choice falls on a host. So at every moment one thread runs, and what happens
// is a function of program and seed.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/device/executors/runner.hpp"
#include "tests/schedules/fiber.hpp"
#include "tests/schedules/policy.hpp"

namespace tessera::schedules {

// What one rank has submitted and what of it is done. Touched only by whoever has the baton.
struct Program {
  struct Entry {
    Body body;
    Operation operation;
    Event event;  // of a wait
    bool is_wait = false;
  };

  // In order, in memory that it keeps. Addresses change when it grows.
  class Queue {
   public:
    bool empty() const noexcept { return first_ == entries_.size(); }
    Entry& front() { return entries_[first_]; }
    const Entry& front() const { return entries_[first_]; }
    void pop_front() {
      if (++first_ == entries_.size()) entries_.clear(), first_ = 0;
    }
    Entry& add() {
      if (entries_.size() == entries_.capacity() && 2 * first_ >= entries_.size()) {
        entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(first_));
        first_ = 0;
      }
      return entries_.emplace_back();
    }

   private:
    std::vector<Entry> entries_;
    std::size_t first_ = 0;
  };

  Program(const ExecutorOptions& options, const Observers& observers)
      : runner(options, observers) {}

  Runner runner;
  std::array<StreamFiber, kMaxStreams> fibers;
  std::array<Queue, kMaxStreams> queues;
  Clock completed;
};

class Scheduler final : public HostScheduler {
 public:
  // `trace`: see shuffled.hpp.
  Scheduler(std::uint64_t seed, int ranks, std::uint64_t* trace);

  void attach(int rank) override;
  void detach(int rank) override;

  // A rank's device comes and goes. The program is not owned.
  void enter(int rank, Program& program);
  void leave(int rank);

  // The rank's host gives the baton up until `event` is complete and the seed chooses it. A thread
  // that is not attached (a device that outlives its rank) is let in for the duration.
  void block(int rank, const Event& event);
  // Throws: ContractError unless the rank's host thread is attached.
  void expect_attached(int rank);

 private:
  enum class HostState { absent, arriving, running, blocked, gone };
  struct Rank {
    HostState host = HostState::absent;
    Event wanted;  // while blocked
    std::condition_variable turn;
    Program* program = nullptr;
  };
  static constexpr int kFree = -1, kChoosing = -2;

  using Lock = std::unique_lock<std::mutex>;
  void hand_over(Lock& lock);
  void wait_for_turn(Lock& lock, int rank);
  void settle();
  bool settle(Program& program);
  void find_candidates();
  bool host_is_ready(const Rank& rank) const;
  bool barrier_is_ready(const CollectiveBarrier& barrier) const;
  void find_attendants(const Candidate& chosen);
  void run(Lock& lock, const Candidate& chosen);
  void tell_trace() const;
  bool fail_waiting();
  std::string describe() const;
  Program::Entry& head(const Candidate& c) const;
  Rank& rank(int r);

  const std::uint64_t seed_;
  SchedulePolicy policy_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  int baton_ = kFree;  // the rank whose host runs, or one of the above
  // Of the choice that is being made; kept for their memory.
  std::vector<Candidate> ready_, here_;
  std::vector<const CollectiveBarrier*> barriers_;
  std::uint64_t trace_;
  std::uint64_t* const told_;  // who wants to know it; may be null
};

}  // namespace tessera::schedules
