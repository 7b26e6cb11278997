#include "runtime/comm/mpi/shared.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "runtime/comm/pull.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/comm/lost_rank.hpp"

namespace tessera::comm {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;

// A meeting takes about a microsecond when all ranks have a core, so a short look comes first. Then
// the core goes to whoever else wants it, which with more ranks than cores is the rank that we wait
// for, and only then to sleep.
constexpr int kSpins = 200;
constexpr int kYields = 20;
constexpr long kLookEveryNs = 100'000'000, kProgressEveryNs = 50'000;
// After a failure peers come to the end of the world soon, or never. Of a rank that is late already
// never is likelier, and who has named it wants to speak.
constexpr std::chrono::milliseconds kFarewellPatience{5000}, kFarewellPatienceWithLate{300};

// Not FUTEX_PRIVATE, which std::atomic::wait uses: other processes wake us.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, long ns) {
  const timespec timeout{.tv_sec = 0, .tv_nsec = ns};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}
void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

constexpr const char* kPlaceNames[kPlaces] = {
    "gather", "reduce", "control", "allocate_symmetric", "recovery", "end of the world"};

}  // namespace

SharedWorld::SharedWorld(std::vector<Segment*> segments, int rank, double timeout_s)
    : segments_(std::move(segments)), rank_(rank), timeout_s_(timeout_s) {
  for (const Segment* s : segments_) {
    recorders_.push_back(&s->calls);
    names_.push_back(s->rank);
  }
}

// ---- Meeting

// The last to come opens the next round and wakes the others. `sleepers` and `round` are
// sequentially consistent, so either the last one sees a sleeper or the sleeper sees the round.
void SharedWorld::meet(Place place, const char* what) {
  Segment::At& here = at(0, place);
  const std::uint32_t round = here.round.load(memory_order_acquire);
  if (!outlives_failure(place) && is_aborted()) give_up();
  at(rank_, place).reached.store(round + 1, memory_order_release);
  if (here.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(size())) {
    here.arrived.store(0, memory_order_relaxed);
    here.round.store(round + 1, memory_order_seq_cst);
    if (here.sleepers.load(memory_order_seq_cst) != 0) futex_wake_all(here.round);
    return;
  }
  for (int i = 0; i < kSpins; ++i)
    if (here.round.load(memory_order_acquire) != round) return;
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (here.round.load(memory_order_acquire) != round) return;
  }
  const auto start = std::chrono::steady_clock::now();
  while (!sleep(place, round)) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (place == Place::allocate || place == Place::recovery)
      look_around(place, round, what, waited.count() > timeout_s_);
    if (!is_aborted()) continue;
    if (!outlives_failure(place) || has_lost() ||
        (place == Place::farewell && waited > farewell_patience() && withdraw(round)))
      give_up();
  }
}

std::chrono::milliseconds SharedWorld::farewell_patience() const {
  return segments_[0]->lost_is_reason ? kFarewellPatienceWithLate : kFarewellPatience;
}

// Who goes from the end does not count as one that has come, or the last one would take all for
// met. False: all have come after all, or the last one is about to open the round.
bool SharedWorld::withdraw(std::uint32_t round) {
  Segment::At& here = at(0, Place::farewell);
  std::uint32_t arrived = here.arrived.load();
  while (here.round.load() == round && arrived != 0 &&
         arrived != static_cast<std::uint32_t>(size()))
    if (here.arrived.compare_exchange_weak(arrived, arrived - 1)) return true;
  return false;
}

// True when the round is over.
bool SharedWorld::sleep(Place place, std::uint32_t round) {
  Segment::At& here = at(0, place);
  const bool progresses = progress_ && outlives_failure(place);
  if (progresses) progress_();
  here.sleepers.fetch_add(1, memory_order_seq_cst);
  if (here.round.load(memory_order_seq_cst) == round && (outlives_failure(place) || !is_aborted()))
    futex_wait(here.round, round, progresses ? kProgressEveryNs : kLookEveryNs);
  here.sleepers.fetch_sub(1, memory_order_seq_cst);
  return here.round.load(memory_order_acquire) != round;
}

void SharedWorld::look_around(Place place, std::uint32_t round, const char* what, bool is_late) {
  if (!outlives_failure(place) && is_aborted()) give_up();
  std::string missing, ended;
  for (int r = 0; r < size(); ++r) {
    const bool has_left = segments_[static_cast<std::size_t>(r)]->left.load(memory_order_acquire);
    if (at(r, place).reached.load(memory_order_acquire) > round) continue;
    missing += concat(missing.empty() ? "" : ", ", r);
    if (has_left) ended += concat(ended.empty() ? "" : ", ", r);
  }
  if (missing.empty()) return;
  const auto where = concat(kPlaceNames[static_cast<int>(place)], ", '", what, "': rank ");
  if (!ended.empty()) {
    const auto reason = concat(where, ended, " has ended without it, and rank ", rank_,
                               " waits; every rank must submit the same collectives");
    abort(reason);
    throw CommError(reason);
  }
  if (!is_late) return;
  const auto reason = concat(where, missing, " has not come for ", timeout_s_, " s");
  abort_for_late(reason);
  throw LostRank(reason);
}

bool SharedWorld::is_aborted() const {
  return segments_[0]->state.load(memory_order_seq_cst) != Segment::kFine;
}

bool SharedWorld::has_lost() const {
  return is_aborted() && segments_[0]->lost.load(memory_order_relaxed) >= 0;
}

void SharedWorld::give_up() const {
  const std::string message = "collective: given up because " + reason();
  if (segments_[0]->lost_is_reason) throw LostRank(message);
  throw CommError(message);
}

bool SharedWorld::is_at_end(int rank) const {
  return at(rank, Place::farewell).reached.load(memory_order_acquire) > 0;
}

void SharedWorld::abort_because(const std::string& reason, int lost, bool lost_is_reason) noexcept {
  Segment& first = *segments_[0];
  std::uint32_t fine = Segment::kFine;
  if (!first.state.compare_exchange_strong(fine, Segment::kWriting)) {
    if (lost >= 0) first.lost = lost;  // no reason any more, but nobody need wait for it
    return;
  }
  std::strncpy(first.reason, reason.c_str(), sizeof(first.reason) - 1);
  first.lost = lost;
  first.lost_is_reason = lost_is_reason;
  first.state.store(Segment::kAborted, memory_order_seq_cst);
  for (Segment::At& place : first.at) futex_wake_all(place.round);
}

std::string SharedWorld::reason() const {
  const Segment& first = *segments_[0];
  while (first.state.load(memory_order_acquire) == Segment::kWriting) sched_yield();
  return is_aborted() ? first.reason : "";
}

// Between the two meetings no rank is anywhere else, so the others can be put back to where all
// ranks had last come together.
void SharedWorld::meet_again(std::span<double> largest, const std::function<void()>& clear) {
  std::copy(largest.begin(), largest.end(), segments_[static_cast<std::size_t>(rank_)]->brought);
  meet(Place::recovery, "recover");
  clear();
  for (std::size_t i = 0; i < largest.size(); ++i)
    for (const Segment* other : segments_) largest[i] = std::max(largest[i], other->brought[i]);
  for (int p = 0; p < kPlaces; ++p) {
    const auto place = static_cast<Place>(p);
    if (outlives_failure(place)) continue;
    at(rank_, place).reached.store(at(0, place).round.load());
    if (rank_ == 0) at(0, place).arrived.store(0);
  }
  if (rank_ == 0) {
    segments_[0]->lost = -1;
    segments_[0]->state.store(Segment::kFine);
  }
  meet(Place::recovery, "recover");
}

void SharedWorld::leave() noexcept {
  segments_[static_cast<std::size_t>(rank_)]->left.store(1, memory_order_seq_cst);
  for (Segment::At& place : segments_[0]->at) futex_wake_all(place.round);
}

// ---- Windows

void SharedWorld::add(Window window) {
  const std::lock_guard lock(mutex_);
  windows_.push_back(std::make_unique<Window>(std::move(window)));
}

void SharedWorld::remove(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(windows_, [&](const auto& w) { return w->number == number; });
}

const SharedWorld::Window* SharedWorld::find(const void* data, std::int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::less_equal<const std::byte*> at_most;  // a total order, also between allocations
  const std::lock_guard lock(mutex_);
  for (const auto& w : windows_) {
    const std::byte* base = w->bases[static_cast<std::size_t>(rank_)];
    if (at_most(base, begin) && at_most(begin + bytes, base + w->bytes)) return w.get();
  }
  return nullptr;
}

// ---- Communicator

namespace {

class SharedCommunicator final : public Communicator {
 public:
  SharedCommunicator(DeviceContext& context, SharedWorld& world, Place place, std::string role,
                     StreamId stream)
      : Communicator(context, world.recorder(world.rank()), std::move(role), stream, world.rank(),
                     world.size()),
        world_(world),
        place_(place),
        inputs_(static_cast<std::size_t>(world.size())) {
    for (int r = 0; r < size(); ++r) published_.push_back(&world.at(r, place).published);
  }

 private:
  struct Part {
    SharedCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, Mover(exec)); }
  };

  // What of an item is at the same offset on every rank, and where in it a rank's send begins: an
  // all_gather in place sends from the rank's own chunk of recv, everything else from send.
  struct Common {
    const SharedWorld::Window* window = nullptr;  // null: no memory that all can read
    std::int64_t offset = 0;
    std::int64_t stride = 0;  // from one rank's send to the next
  };

  struct Peers {
    const SharedCommunicator& self;
    Common at;

    void open(const Collective& c, std::size_t, std::int64_t staged) {
      at = staged == StagingPlan::kDirect ? self.common(c) : Common{nullptr, staged, 0};
    }
    const std::byte* send(int peer) const {
      const std::byte* base = at.window ? at.window->bases[static_cast<std::size_t>(peer)]
                                        : self.world_.at(peer, self.place_).staging;
      return base + at.offset + peer * at.stride;
    }
  };

  Common common(const Collective& c) const {
    const auto bytes = static_cast<std::int64_t>(item_bytes(c));
    const auto* begin = static_cast<const std::byte*>(c.send);
    const auto* recv = static_cast<const std::byte*>(c.recv);
    const bool is_own_chunk =
        c.kind == CollectiveKind::all_gather && begin == recv + rank() * bytes;
    if (is_own_chunk) begin = recv;
    const bool is_whole = is_own_chunk || c.kind == CollectiveKind::reduce_scatter;
    Common common{world_.find(begin, bytes * (is_whole ? size() : 1)), 0, is_own_chunk ? bytes : 0};
    if (common.window)
      common.offset = begin - common.window->bases[static_cast<std::size_t>(rank())];
    return common;
  }

  void check_transport(const char* group, std::span<const Collective> items) const override {
    StagingPlan plan;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Collective& c = items[i];
      const bool is_direct = plan.next(c) == StagingPlan::kDirect;
      TESSERA_EXPECT(
          !is_direct || c.count == 0 || c.kind == CollectiveKind::barrier || common(c).window,
          name(c.kind), " '", group, "', item ", i, ": send ", c.send,
          " does not lie in memory of World::allocate_symmetric, which is all that "
          "other processes can read");
    }
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_joint(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call, const Mover& mover) {
    recorder_.started(call.number, stream());
    Segment::At& mine = world_.at(rank(), place_);
    publish(mine.published, call, place_of_sends(call.items()));
    stage(mover, mine.staging, call.items(), rank());
    world_.meet(place_, call.name);
    world_.agree([&] { check_agreement(published_, role(), world_.recorders()); });
    pull(mover, call.items(), rank(), size(), inputs_, Peers{*this, {}});
    world_.meet(place_, call.name);
    recorder_.done(call.number, stream());
  }

  std::uint64_t place_of_sends(std::span<const Collective> items) const {
    StagingPlan plan;
    std::uint64_t hash = 0;
    for (const Collective& c : items) {
      if (plan.next(c) != StagingPlan::kDirect || c.count == 0) continue;
      const Common at = common(c);
      if (!at.window) continue;  // a barrier
      hash = fnv1a(at.window->number, hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.offset), hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.stride), hash);
    }
    return hash;
  }

  SharedWorld& world_;
  const Place place_;
  std::vector<const void*> inputs_;  // of one sum; the stream's
  std::vector<const Published*> published_;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_communicator(DeviceContext& context, SharedWorld& world,
                                                       Place place, std::string role,
                                                       StreamId stream) {
  return std::make_unique<SharedCommunicator>(context, world, place, std::move(role), stream);
}

}  // namespace tessera::comm
