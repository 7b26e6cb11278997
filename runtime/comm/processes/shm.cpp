#include "runtime/comm/processes/shm.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>

#include "tessera/base/error.hpp"
#include "tessera/comm/lost_rank.hpp"

namespace tessera::comm {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;

// A barrier takes about a microsecond when all ranks have a core, so a short look comes first. Then
// the core goes to whoever else wants it, which with more ranks than cores is the rank that we wait
// for, and only then to sleep.
constexpr int kSpins = 200;
constexpr int kYields = 20;
constexpr long kLookEveryNs = 100'000'000, kProgressEveryNs = 50'000;
// After a failure peers come to the end of the world soon, or never. Of a rank that is late already
// never is likelier, and who has named it wants to speak.
constexpr std::chrono::milliseconds kShutdownPatience{5000}, kShutdownPatienceWithLate{300};

// Not FUTEX_PRIVATE, which std::atomic::wait uses: other processes wake us.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, long ns) {
  const timespec timeout{.tv_sec = 0, .tv_nsec = ns};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}
void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

constexpr const char* kBarrierNames[] = {"collective", "allocate_symmetric", "recovery",
                                         "end of the world"};

}  // namespace

ShmWorld::ShmWorld(std::vector<Segment*> segments, int rank, double timeout_s)
    : segments_(std::move(segments)), rank_(rank), timeout_s_(timeout_s) {
  for (Segment* s : segments_) {
    recovery_.parts.push_back(&s->recovery);
    shutdown_.parts.push_back(&s->shutdown);
  }
  for (Party* party : {&recovery_, &shutdown_}) {
    party->own = static_cast<std::size_t>(rank);
    party->on_host.resize(segments_.size());
    std::iota(party->on_host.begin(), party->on_host.end(), 0);
  }
}

// ---- Barriers

// The last to come opens the next round and wakes the others. `sleepers` and `round` are
// sequentially consistent, so either the last one sees a sleeper or the sleeper sees the round.
void ShmWorld::barrier(const Party& party, BarrierKind kind, const char* what, std::uint64_t call) {
  BarrierPart& first = *party.parts[0];
  const std::uint32_t round = first.round.load(memory_order_acquire);
  if (gives_up(party, kind, call)) give_up();
  party.parts[party.own]->reached.store(round + 1, memory_order_release);
  if (first.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(party.parts.size())) {
    first.arrived.store(0, memory_order_relaxed);
    first.round.store(round + 1, memory_order_seq_cst);
    if (first.sleepers.load(memory_order_seq_cst) != 0) futex_wake_all(first.round);
    return;
  }
  for (int i = 0; i < kSpins; ++i)
    if (first.round.load(memory_order_acquire) != round) return;
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (first.round.load(memory_order_acquire) != round) return;
  }
  const auto start = std::chrono::steady_clock::now();
  while (!sleep(party, kind, round, call)) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (kind == BarrierKind::allocate || kind == BarrierKind::recovery)
      look_around(party, kind, round, what, waited.count() > timeout_s_);
    if (!is_aborted()) continue;
    if (gives_up(party, kind, call) || (outlives_failure(kind) && has_lost()) ||
        (kind == BarrierKind::shutdown && waited > shutdown_patience() && withdraw(round)))
      give_up();
  }
}

// What one rank gives up, all do, whatever is committed later.
bool ShmWorld::gives_up(const Party& party, BarrierKind kind, std::uint64_t call) const {
  if (outlives_failure(kind) || !is_aborted()) return false;
  std::atomic<bool>& is_broken = party.parts[0]->is_broken;
  if (is_broken) return true;
  bool gives_up = call == 0 || is_final();
  for (std::size_t i = 0; i < party.parts.size() && !gives_up; ++i)
    gives_up = segment(party.on_host[i]).has_halted && party.parts[i]->committed < call;
  if (gives_up) is_broken = true;
  return gives_up;
}

std::chrono::milliseconds ShmWorld::shutdown_patience() const {
  return segments_[0]->lost_is_reason ? kShutdownPatienceWithLate : kShutdownPatience;
}

// Who goes from the end does not count as one that has come, or the last one would take all for
// met. False: all have come after all, or the last one is about to open the round.
bool ShmWorld::withdraw(std::uint32_t round) {
  BarrierPart& here = segments_[0]->shutdown;
  std::uint32_t arrived = here.arrived.load();
  while (here.round.load() == round && arrived != 0 &&
         arrived != static_cast<std::uint32_t>(size()))
    if (here.arrived.compare_exchange_weak(arrived, arrived - 1)) return true;
  return false;
}

// True when the round is over.
bool ShmWorld::sleep(const Party& party, BarrierKind kind, std::uint32_t round,
                     std::uint64_t call) {
  BarrierPart& first = *party.parts[0];
  const bool progresses = progress_ && outlives_failure(kind);
  if (progresses) progress_();
  first.sleepers.fetch_add(1, memory_order_seq_cst);
  if (first.round.load(memory_order_seq_cst) == round && !gives_up(party, kind, call))
    futex_wait(first.round, round, progresses ? kProgressEveryNs : kLookEveryNs);
  first.sleepers.fetch_sub(1, memory_order_seq_cst);
  return first.round.load(memory_order_acquire) != round;
}

void ShmWorld::look_around(const Party& party, BarrierKind kind, std::uint32_t round,
                           const char* what, bool is_late) {
  if (!outlives_failure(kind) && is_aborted()) give_up();
  std::string missing, ended;
  for (std::size_t i = 0; i < party.parts.size(); ++i) {
    const Segment& peer = segment(party.on_host[i]);
    const bool has_left = peer.left.load(memory_order_acquire);
    if (party.parts[i]->reached.load(memory_order_acquire) > round) continue;
    missing += concat(missing.empty() ? "" : ", ", peer.rank);
    if (has_left) ended += concat(ended.empty() ? "" : ", ", peer.rank);
  }
  if (missing.empty()) return;
  const auto where = concat(kBarrierNames[static_cast<int>(kind)], ", '", what, "': rank ");
  if (!ended.empty()) {
    const auto reason = concat(where, ended, " has ended without it, and rank ", name_of(rank_),
                               " waits; every rank must submit the same collectives");
    abort(reason);
    throw CommError(reason);
  }
  if (!is_late) return;
  const auto reason = concat(where, missing, " has not come for ", timeout_s_, " s");
  abort_for_late(reason);
  throw LostRank(reason);
}

bool ShmWorld::is_aborted() const {
  return segments_[0]->state.load(memory_order_seq_cst) != Segment::kFine;
}

bool ShmWorld::is_final() const {
  return segments_[0]->state.load(memory_order_seq_cst) == Segment::kAborted;
}

bool ShmWorld::has_lost() const {
  return is_aborted() && segments_[0]->lost.load(memory_order_relaxed) >= 0;
}

void ShmWorld::give_up() const {
  const std::string message = "collective: given up because " + reason();
  if (segments_[0]->lost_is_reason) throw LostRank(message);
  throw CommError(message);
}

bool ShmWorld::is_at_end(int rank) const {
  return segment(rank).shutdown.reached.load(memory_order_acquire) > 0;
}

// True for the first one.
bool ShmWorld::explain(const std::string& reason, int lost, bool lost_is_reason) noexcept {
  Segment& first = *segments_[0];
  std::uint32_t fine = Segment::kFine;
  if (!first.state.compare_exchange_strong(fine, Segment::kWriting)) return false;
  std::strncpy(first.reason, reason.c_str(), sizeof(first.reason) - 1);
  first.lost = lost;
  first.lost_is_reason = lost_is_reason;
  first.state.store(Segment::kHalted, memory_order_seq_cst);
  return true;
}

void ShmWorld::abort_because(const std::string& reason, int lost, bool lost_is_reason) noexcept {
  Segment& first = *segments_[0];
  if (!explain(reason, lost, lost_is_reason) && lost >= 0)
    first.lost = lost;  // no reason any more, but nobody need wait for it
  this->reason();       // stands
  std::uint32_t halted = Segment::kHalted;
  if (first.state.compare_exchange_strong(halted, Segment::kAborted)) wake_all();
}

void ShmWorld::halt(const std::string& reason) noexcept {
  segments_[static_cast<std::size_t>(rank_)]->has_halted = true;
  explain(reason, -1, false);
  wake_all();
}

std::string ShmWorld::reason() const {
  const Segment& first = *segments_[0];
  while (first.state.load(memory_order_acquire) == Segment::kWriting) sched_yield();
  return is_aborted() ? first.reason : "";
}

// Between the two barriers of the recovery no rank is at any other, so the others can be put back
// to where all ranks had last come together.
void ShmWorld::rejoin(std::span<double> largest, const std::function<void()>& clear) {
  std::copy(largest.begin(), largest.end(),
            segments_[static_cast<std::size_t>(rank_)]->contributed);
  barrier(recovery_, BarrierKind::recovery, "recover");
  clear();
  segments_[static_cast<std::size_t>(rank_)]->has_halted = false;
  for (std::size_t i = 0; i < largest.size(); ++i)
    for (const Segment* other : segments_) largest[i] = std::max(largest[i], other->contributed[i]);
  for_each_group([](ShmGroup& group) { group.rearm(); });
  if (rank_ == 0) {
    segments_[0]->lost = -1;
    segments_[0]->state.store(Segment::kFine);
  }
  barrier(recovery_, BarrierKind::recovery, "recover");
}

void ShmWorld::leave() noexcept {
  segments_[static_cast<std::size_t>(rank_)]->left.store(1, memory_order_seq_cst);
  wake_all();
}

// Ranks that wait in groups which this one is not in look up by themselves, soon.
void ShmWorld::wake_all() noexcept {
  futex_wake_all(recovery_.parts[0]->round);
  futex_wake_all(shutdown_.parts[0]->round);
  for_each_group([](ShmGroup& group) { group.wake_all(); });
}

void ShmWorld::add(ShmGroup& group) {
  const std::lock_guard lock(groups_mutex_);
  groups_.push_back(&group);
}

std::string ShmWorld::position(int rank) const {
  const std::lock_guard lock(groups_mutex_);
  return groups_.empty() ? concat("rank ", name_of(rank), " has submitted nothing")
                         : groups_[0]->recorder(rank).position(name_of(rank));
}

// ---- Groups

ShmGroup::ShmGroup(ShmWorld& world, std::vector<GroupSegment*> segments, std::vector<int> on_host,
                   int rank)
    : world_(world), segments_(std::move(segments)), rank_(rank) {
  for (GroupSegment* s : segments_) {
    for (std::size_t r = 0; r < roles_.size(); ++r) roles_[r].parts.push_back(&s->roles[r].barrier);
    allocate_.parts.push_back(&s->allocate);
    recorders_.push_back(&s->calls);
  }
  for (const int r : on_host) names_.push_back(world.name_of(r));
  allocate_.on_host = std::move(on_host);
  allocate_.own = static_cast<std::size_t>(rank);
  for (Party& party : roles_) {
    party.on_host = allocate_.on_host;
    party.own = allocate_.own;
  }
  world.add(*this);
}

void ShmGroup::rearm() {
  const auto put_back = [](const Party& party) {
    party.parts[party.own]->reached.store(party.parts[0]->round.load());
    party.parts[party.own]->committed = 0;
    if (party.own != 0) return;
    party.parts[0]->arrived.store(0);
    party.parts[0]->is_broken = false;
  };
  std::ranges::for_each(roles_, put_back);
  put_back(allocate_);
}

void ShmGroup::commit() const noexcept {
  const std::uint64_t last = recorders_[static_cast<std::size_t>(rank_)]->last_submitted();
  for (const Party& party : roles_) party.parts[party.own]->committed = last;
}

void ShmGroup::wake_all() const noexcept {
  for (const Party& party : roles_) futex_wake_all(party.parts[0]->round);
  futex_wake_all(allocate_.parts[0]->round);
}

void ShmGroup::add(SharedMapping mapping) {
  const std::lock_guard lock(mutex_);
  mappings_.push_back(std::make_unique<SharedMapping>(std::move(mapping)));
}

void ShmGroup::remove(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(mappings_, [&](const auto& w) { return w->number == number; });
}

const SharedMapping* ShmGroup::find(const void* data, std::int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::less_equal<const std::byte*> at_most;  // a total order, also between allocations
  const std::lock_guard lock(mutex_);
  for (const auto& w : mappings_) {
    const std::byte* base = w->bases[static_cast<std::size_t>(rank_)];
    if (at_most(base, begin) && at_most(begin + bytes, base + w->bytes)) return w.get();
  }
  return nullptr;
}

const SharedMapping& ShmGroup::mapping(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return **std::ranges::find(mappings_, number, [](const auto& w) { return w->number; });
}

}  // namespace tessera::comm
