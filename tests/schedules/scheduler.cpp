#include "tests/schedules/scheduler.hpp"

#include <algorithm>

#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::schedules {

Scheduler::Scheduler(std::uint64_t seed, int ranks, std::uint64_t* trace)
    : seed_(seed), policy_(seed), trace_(fnv1a("")), told_(trace) {
  TESSERA_EXPECT(ranks >= 1, "shuffled: ", ranks, " ranks; give at least 1");
  ranks_ = std::vector<Rank>(static_cast<std::size_t>(ranks));
}

// ---- Hosts

void Scheduler::attach(int r) {
  Lock lock(mutex_);
  Rank& self = rank(r);
  TESSERA_EXPECT(self.host == HostState::absent || self.host == HostState::gone,
                 "HostScheduler::attach: rank ", r, " is attached already");
  self.host = HostState::arriving;
  if (baton_ == kFree) hand_over(lock);
  wait_for_turn(lock, r);
}

void Scheduler::detach(int r) {
  Lock lock(mutex_);
  Rank& self = rank(r);
  self.host = HostState::gone;
  if (baton_ == r || baton_ == kFree) hand_over(lock);
  tell_trace();
}

void Scheduler::tell_trace() const {
  if (told_ && std::ranges::all_of(ranks_, [](const Rank& r) { return r.host == HostState::gone; }))
    *told_ = trace_;
}

void Scheduler::block(int r, const Event& event) {
  Lock lock(mutex_);
  Rank& self = ranks_[static_cast<std::size_t>(r)];
  const HostState before = self.host;
  self.host = HostState::blocked;
  self.wanted = event;
  if (before == HostState::running || baton_ == kFree) hand_over(lock);
  wait_for_turn(lock, r);
  if (before == HostState::running) return;
  self.host = before;
  hand_over(lock);
}

void Scheduler::wait_for_turn(Lock& lock, int r) {
  Rank& self = ranks_[static_cast<std::size_t>(r)];
  self.turn.wait(lock, [&] { return baton_ == r; });
}

void Scheduler::expect_attached(int r) {
  const Lock lock(mutex_);
  TESSERA_EXPECT(rank(r).host == HostState::running, "shuffled executor: the host thread of rank ",
                 r, " submits without the baton; call HostScheduler::attach(", r, ") in it first");
}

void Scheduler::enter(int r, Program& program) {
  const Lock lock(mutex_);
  Rank& self = rank(r);
  TESSERA_EXPECT(self.program == nullptr, "shuffled: rank ", r,
                 " has a device already; end that one first");
  self.program = &program;
}

void Scheduler::leave(int r) {
  const Lock lock(mutex_);
  ranks_[static_cast<std::size_t>(r)].program = nullptr;
}

Scheduler::Rank& Scheduler::rank(int r) {
  TESSERA_EXPECT(r >= 0 && r < static_cast<int>(ranks_.size()), "shuffled: rank ", r,
                 " of a schedule for ", ranks_.size(), " ranks");
  return ranks_[static_cast<std::size_t>(r)];
}

// ---- The baton

// Runs operations until the choice falls on a host, which then has the baton; frees it when nothing
// is left to choose and nobody waits. Nothing starts before every rank has come, or the order of
// arrival would show in the trace.
void Scheduler::hand_over(Lock& lock) {
  baton_ = kFree;
  if (std::any_of(ranks_.begin(), ranks_.end(),
                  [](const Rank& r) { return r.host == HostState::absent; }))
    return;
  baton_ = kChoosing;
  for (;;) {
    settle();
    find_candidates();
    if (ready_.empty()) {
      if (fail_waiting()) continue;
      baton_ = kFree;
      return;
    }
    const Candidate chosen = ready_[policy_.choose(ready_)];
    if (chosen.actor != 0) {
      run(lock, chosen);
      continue;
    }
    Rank& next = ranks_[static_cast<std::size_t>(chosen.rank)];
    next.host = HostState::running;
    baton_ = chosen.rank;
    next.turn.notify_one();
    return;
  }
}

// Consumes what needs no choice: waits for events that are complete, and everything behind a
// failure.
void Scheduler::settle() {
  for (Rank& r : ranks_)
    while (r.program != nullptr && settle(*r.program)) {
    }
}

bool Scheduler::settle(Program& program) {
  bool changed = false;
  for (std::size_t s = 0; s < kMaxStreams; ++s) {
    auto& queue = program.queues[s];
    for (; !queue.empty(); queue.pop_front(), changed = true) {
      const Program::Entry& entry = queue.front();
      if (entry.is_wait) {
        const Clock& wanted = entry.event.clock;
        if (!program.completed.covers(wanted)) break;
        program.runner.follow(static_cast<StreamId>(s), wanted);
        for (std::size_t i = 0; i < kMaxStreams; ++i)
          if (wanted.ticks[i] > 0) program.fibers[s].learn(program.fibers[i], wanted.ticks[i]);
      } else {
        if (!program.runner.failure().reaches(static_cast<StreamId>(s))) break;
        program.runner.skip(entry.operation);
        program.fibers[s].finished(entry.operation.tick);  // what its stream did before, too
        program.completed[entry.operation.stream] = entry.operation.tick;
      }
    }
  }
  return changed;
}

// A barrier is one candidate, at its first rank.
void Scheduler::find_candidates() {
  ready_.clear();
  barriers_.clear();
  for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
    const Rank& self = ranks_[static_cast<std::size_t>(r)];
    if (host_is_ready(self)) ready_.push_back({r, 0});
    if (self.program == nullptr) continue;
    for (int s = 0; s < kMaxStreams; ++s) {
      const auto& queue = self.program->queues[static_cast<std::size_t>(s)];
      if (queue.empty() || queue.front().is_wait) continue;
      if (const CollectiveBarrier* barrier = queue.front().operation.barrier; barrier != nullptr) {
        if (!barrier_is_ready(*barrier)) continue;
        if (!barrier->is_given_up()) {
          if (std::find(barriers_.begin(), barriers_.end(), barrier) != barriers_.end()) continue;
          barriers_.push_back(barrier);
        }
      }
      ready_.push_back({r, 1 + s});
    }
  }
}

bool Scheduler::host_is_ready(const Rank& r) const {
  if (r.host == HostState::arriving) return true;
  return r.host == HostState::blocked && r.program->completed.covers(r.wanted.clock);
}

// All ranks are there, or nobody will come any more.
bool Scheduler::barrier_is_ready(const CollectiveBarrier& barrier) const {
  if (barrier.is_given_up()) return true;
  int present = 0;
  for (const Rank& r : ranks_)
    for (int s = 0; r.program != nullptr && s < kMaxStreams; ++s) {
      const auto& queue = r.program->queues[static_cast<std::size_t>(s)];
      present +=
          !queue.empty() && !queue.front().is_wait && queue.front().operation.barrier == &barrier;
    }
  return present >= barrier.size();
}

// ---- Operations

Program::Entry& Scheduler::head(const Candidate& c) const {
  Program::Entry& entry = ranks_[static_cast<std::size_t>(c.rank)]
                              .program->queues[static_cast<std::size_t>(c.actor - 1)]
                              .front();
  entry.operation.body = &entry.body;  // wherever it lies by now
  return entry;
}

// The chosen operation alone, or one of each rank of its barrier, in rank order.
void Scheduler::find_attendants(const Candidate& chosen) {
  const CollectiveBarrier* barrier = head(chosen).operation.barrier;
  here_.clear();
  if (barrier == nullptr || barrier->is_given_up()) return here_.push_back(chosen);
  for (int r = 0; r < static_cast<int>(ranks_.size()); ++r)
    for (int s = 0; s < kMaxStreams; ++s) {
      const Program* program = ranks_[static_cast<std::size_t>(r)].program;
      if (program == nullptr || program->queues[static_cast<std::size_t>(s)].empty()) continue;
      const Candidate c{r, 1 + s};
      if (!head(c).is_wait && head(c).operation.barrier == barrier) here_.push_back(c);
    }
}

void Scheduler::run(Lock& lock, const Candidate& chosen) {
  find_attendants(chosen);
  CollectiveBarrier* const barrier = head(chosen).operation.barrier;
  const auto runner = [&](const Candidate& c) -> Runner& {
    return ranks_[static_cast<std::size_t>(c.rank)].program->runner;
  };
  const auto fiber = [&](const Candidate& c) -> StreamFiber& {
    return ranks_[static_cast<std::size_t>(c.rank)]
        .program->fibers[static_cast<std::size_t>(c.actor - 1)];
  };
  const auto invoke = [&](Exec::Phase phase) {
    for (const Candidate& c : here_) {
      Operation there = head(c).operation;
      const Body on_fiber([f = &fiber(c), tick = there.tick, body = there.body](Exec& exec) {
        f->run(tick, *body, exec);
      });
      there.body = &on_fiber;
      runner(c).invoke(there, phase);
    }
    if (barrier == nullptr) return;
    for (const Candidate& c : here_) fiber(c).arrive(barrier);
    for (const Candidate& c : here_) fiber(c).leave(barrier);
  };
  for (const Candidate& c : here_) {
    const Operation& operation = head(c).operation;
    trace_ = fnv1a(static_cast<std::uint64_t>(c.rank), trace_);
    trace_ = fnv1a(static_cast<std::uint64_t>(index(operation.stream)), trace_);
    trace_ = fnv1a(operation.name, trace_);
  }
  // Bodies and observers may take their time; only arrivals can interfere, and they wait.
  lock.unlock();
  for (const Candidate& c : here_) runner(c).begin(head(c).operation);
  const auto is_given_up = [barrier] { return barrier != nullptr && barrier->is_given_up(); };
  if (barrier != nullptr && !is_given_up()) invoke(Exec::Phase::publish);
  // Without every input no rank may run, and with a rank that failed to run none has a result.
  if (!is_given_up()) invoke(Exec::Phase::run);
  const bool gives_up = is_given_up();
  if (barrier != nullptr && !gives_up) barrier->pass();
  for (const Candidate& c : here_) {
    if (gives_up && !runner(c).failure().reaches(head(c).operation.stream))
      runner(c).fail(head(c).operation,
                     std::make_exception_ptr(CommError("collective: given up because " +
                                                       barrier->abort_signal().reason())));
    runner(c).end(head(c).operation);
    fiber(c).finished(head(c).operation.tick);
  }
  lock.lock();
  for (const Candidate& c : here_) {
    Program& program = *ranks_[static_cast<std::size_t>(c.rank)].program;
    const Operation& operation = head(c).operation;
    program.completed[operation.stream] = operation.tick;
    program.queues[index(operation.stream)].pop_front();
  }
}

// ---- Deadlock

// Fails every rank that still has something to wait for; false when no host waits. Their hosts
// throw from `block`.
bool Scheduler::fail_waiting() {
  if (std::none_of(ranks_.begin(), ranks_.end(),
                   [](const Rank& r) { return r.host == HostState::blocked; }))
    return false;
  const auto error = std::make_exception_ptr(DeviceError(describe()));
  for (Rank& r : ranks_) {
    if (r.program == nullptr) continue;
    for (int s = 0; s < kMaxStreams; ++s) {
      const auto& queue = r.program->queues[static_cast<std::size_t>(s)];
      if (queue.empty()) continue;
      Operation at{.stream = static_cast<StreamId>(s)};
      if (!queue.front().is_wait) at = queue.front().operation;
      r.program->runner.fail(at, error);
    }
  }
  return true;
}

// One line: for each rank what its host and the head of each stream wait for.
std::string Scheduler::describe() const {
  std::string text =
      concat("shuffled schedule of seed ", seed_, ": no rank can go on; every rank must ",
             "submit the same collectives in the same order");
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& self = ranks_[r];
    text += concat("; rank ", r, ": host ");
    if (self.host == HostState::blocked)
      text += concat("blocks on ", name(self.wanted.stream), "@", self.wanted.tick);
    else
      text += "has left";
    for (int s = 0; self.program != nullptr && s < kMaxStreams; ++s) {
      const auto& queue = self.program->queues[static_cast<std::size_t>(s)];
      if (queue.empty()) continue;
      const Program::Entry& entry = queue.front();
      text += concat(", ", kStreamNames[s]);
      if (entry.is_wait) {
        text += concat(" waits for ", name(entry.event.stream), "@", entry.event.tick);
      } else {
        text += concat(" is at '", entry.operation.name, "'@", entry.operation.tick);
        text += " and waits for its peers";
      }
    }
  }
  return text;
}

}  // namespace tessera::schedules
