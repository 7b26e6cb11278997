#include "runtime/comm/mpi/shm.hpp"

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

constexpr const char* kBarrierNames[kBarriers] = {
    "gather", "reduce", "control", "allocate_symmetric", "recovery", "end of the world"};

}  // namespace

ShmWorld::ShmWorld(std::vector<Segment*> segments, int rank, double timeout_s)
    : segments_(std::move(segments)), rank_(rank), timeout_s_(timeout_s) {
  for (const Segment* s : segments_) {
    recorders_.push_back(&s->calls);
    names_.push_back(s->rank);
  }
}

// ---- AbortSignal

// The last to come opens the next round and wakes the others. `sleepers` and `round` are
// sequentially consistent, so either the last one sees a sleeper or the sleeper sees the round.
void ShmWorld::barrier(BarrierId id, const char* what) {
  Segment::At& here = at(0, id);
  const std::uint32_t round = here.round.load(memory_order_acquire);
  if (!outlives_failure(id) && is_aborted()) give_up();
  at(rank_, id).reached.store(round + 1, memory_order_release);
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
  while (!sleep(id, round)) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (id == BarrierId::allocate || id == BarrierId::recovery)
      look_around(id, round, what, waited.count() > timeout_s_);
    if (!is_aborted()) continue;
    if (!outlives_failure(id) || has_lost() ||
        (id == BarrierId::shutdown && waited > shutdown_patience() && withdraw(round)))
      give_up();
  }
}

std::chrono::milliseconds ShmWorld::shutdown_patience() const {
  return segments_[0]->lost_is_reason ? kShutdownPatienceWithLate : kShutdownPatience;
}

// Who goes from the end does not count as one that has come, or the last one would take all for
// met. False: all have come after all, or the last one is about to open the round.
bool ShmWorld::withdraw(std::uint32_t round) {
  Segment::At& here = at(0, BarrierId::shutdown);
  std::uint32_t arrived = here.arrived.load();
  while (here.round.load() == round && arrived != 0 &&
         arrived != static_cast<std::uint32_t>(size()))
    if (here.arrived.compare_exchange_weak(arrived, arrived - 1)) return true;
  return false;
}

// True when the round is over.
bool ShmWorld::sleep(BarrierId id, std::uint32_t round) {
  Segment::At& here = at(0, id);
  const bool progresses = progress_ && outlives_failure(id);
  if (progresses) progress_();
  here.sleepers.fetch_add(1, memory_order_seq_cst);
  if (here.round.load(memory_order_seq_cst) == round && (outlives_failure(id) || !is_aborted()))
    futex_wait(here.round, round, progresses ? kProgressEveryNs : kLookEveryNs);
  here.sleepers.fetch_sub(1, memory_order_seq_cst);
  return here.round.load(memory_order_acquire) != round;
}

void ShmWorld::look_around(BarrierId id, std::uint32_t round, const char* what, bool is_late) {
  if (!outlives_failure(id) && is_aborted()) give_up();
  std::string missing, ended;
  for (int r = 0; r < size(); ++r) {
    const bool has_left = segments_[static_cast<std::size_t>(r)]->left.load(memory_order_acquire);
    if (at(r, id).reached.load(memory_order_acquire) > round) continue;
    missing += concat(missing.empty() ? "" : ", ", r);
    if (has_left) ended += concat(ended.empty() ? "" : ", ", r);
  }
  if (missing.empty()) return;
  const auto where = concat(kBarrierNames[static_cast<int>(id)], ", '", what, "': rank ");
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

bool ShmWorld::is_aborted() const {
  return segments_[0]->state.load(memory_order_seq_cst) != Segment::kFine;
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
  return at(rank, BarrierId::shutdown).reached.load(memory_order_acquire) > 0;
}

void ShmWorld::abort_because(const std::string& reason, int lost, bool lost_is_reason) noexcept {
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
  for (Segment::At& barrier : first.at) futex_wake_all(barrier.round);
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
  barrier(BarrierId::recovery, "recover");
  clear();
  for (std::size_t i = 0; i < largest.size(); ++i)
    for (const Segment* other : segments_) largest[i] = std::max(largest[i], other->contributed[i]);
  for (int p = 0; p < kBarriers; ++p) {
    const auto id = static_cast<BarrierId>(p);
    if (outlives_failure(id)) continue;
    at(rank_, id).reached.store(at(0, id).round.load());
    if (rank_ == 0) at(0, id).arrived.store(0);
  }
  if (rank_ == 0) {
    segments_[0]->lost = -1;
    segments_[0]->state.store(Segment::kFine);
  }
  barrier(BarrierId::recovery, "recover");
}

void ShmWorld::leave() noexcept {
  segments_[static_cast<std::size_t>(rank_)]->left.store(1, memory_order_seq_cst);
  for (Segment::At& barrier : segments_[0]->at) futex_wake_all(barrier.round);
}

// ---- Mappings

void ShmWorld::add(SharedMapping mapping) {
  const std::lock_guard lock(mutex_);
  mappings_.push_back(std::make_unique<SharedMapping>(std::move(mapping)));
}

void ShmWorld::remove(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(mappings_, [&](const auto& w) { return w->number == number; });
}

const SharedMapping* ShmWorld::find(const void* data, std::int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::less_equal<const std::byte*> at_most;  // a total order, also between allocations
  const std::lock_guard lock(mutex_);
  for (const auto& w : mappings_) {
    const std::byte* base = w->bases[static_cast<std::size_t>(rank_)];
    if (at_most(base, begin) && at_most(begin + bytes, base + w->bytes)) return w.get();
  }
  return nullptr;
}

const SharedMapping& ShmWorld::mapping(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return **std::ranges::find(mappings_, number, [](const auto& w) { return w->number; });
}

// ---- Communicator

namespace {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(DeviceContext& context, ShmWorld& world, BarrierId id, std::string role,
                  StreamId stream)
      : Communicator(context, world.recorder(world.rank()), std::move(role), stream, world.rank(),
                     world.size()),
        world_(world),
        id_(id),
        inputs_(static_cast<std::size_t>(world.size())) {
    for (int r = 0; r < size(); ++r) published_.push_back(&world.at(r, id).published);
  }

 private:
  struct Part {
    ShmCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, Mover(exec)); }
  };

  // What of an item is at the same offset on every rank, and where in it a rank's send begins: an
  // all_gather in-id sends from the rank's own chunk of recv, everything else from send.
  struct Common {
    const SharedMapping* mapping = nullptr;  // null: no memory that all can read
    std::int64_t offset = 0;
    std::int64_t stride = 0;  // from one rank's send to the next
  };

  struct Peers {
    const ShmCommunicator& self;
    Common at;

    void open(const Collective& c, std::size_t, std::int64_t staged, std::int64_t address) {
      if (staged != StagingPlan::kDirect)
        at = {nullptr, staged, 0};
      else
        at = c.kind == CollectiveKind::send_recv ? self.told(c, address) : self.common(c);
    }
    const std::byte* send(int peer) const {
      const std::byte* base = at.mapping ? at.mapping->bases[static_cast<std::size_t>(peer)]
                                         : self.world_.at(peer, self.id_).staging;
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
    const int chunks = is_own_chunk ? size() : send_chunks(c.kind, size());
    Common common{world_.find(begin, bytes * chunks), 0, is_own_chunk ? bytes : 0};
    if (common.mapping)
      common.offset = begin - common.mapping->bases[static_cast<std::size_t>(rank())];
    return common;
  }

  // Where the send of a send_recv lies, which only its root knows.
  struct Address {
    std::uint64_t mapping;
    std::int64_t offset;
  };
  void tell_addresses(std::byte* staging, std::span<const Collective> items) const {
    StagingPlan plan(size());
    for (const Collective& c : items) {
      if (plan.next(c) != StagingPlan::kDirect || plan.address() == StagingPlan::kDirect ||
          c.root != rank())
        continue;
      const Common at = common(c);
      const Address address{at.mapping->number, at.offset};
      std::memcpy(staging + plan.address(), &address, sizeof address);
    }
  }
  Common told(const Collective& c, std::int64_t at) const {
    Address address;
    std::memcpy(&address, world_.at(c.root, id_).staging + at, sizeof address);
    return {&world_.mapping(address.mapping), address.offset, 0};
  }

  void check_transport(const char* group, std::span<const Collective> items) const override {
    StagingPlan plan(size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Collective& c = items[i];
      const bool is_direct = plan.next(c) == StagingPlan::kDirect;
      const bool is_read = c.kind != CollectiveKind::send_recv || c.root == rank();
      TESSERA_EXPECT(!is_direct || !is_read || c.count == 0 || c.kind == CollectiveKind::barrier ||
                         common(c).mapping,
                     name(c.kind), " '", group, "', item ", i, ": send ", c.send,
                     " does not lie in memory of World::allocate_symmetric, which is all that "
                     "other processes can read");
    }
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call, const Mover& mover) {
    recorder_.started(call.seq, stream());
    Segment::At& mine = world_.at(rank(), id_);
    publish(mine.published, call, send_layout_hash(call.items()));
    stage(mover, mine.staging, call.items(), rank(), size());
    tell_addresses(mine.staging, call.items());
    world_.barrier(id_, call.name);
    world_.agree([&] { check_agreement(published_, role(), world_.recorders()); });
    pull(mover, call.items(), rank(), size(), inputs_, Peers{*this, {}});
    world_.barrier(id_, call.name);
    recorder_.done(call.seq, stream());
  }

  std::uint64_t send_layout_hash(std::span<const Collective> items) const {
    StagingPlan plan(size());
    std::uint64_t hash = 0;
    for (const Collective& c : items) {
      if (plan.next(c) != StagingPlan::kDirect || c.count == 0) continue;
      if (c.kind == CollectiveKind::send_recv) continue;  // its root's alone
      const Common at = common(c);
      if (!at.mapping) continue;  // a barrier
      hash = fnv1a(at.mapping->number, hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.offset), hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.stride), hash);
    }
    return hash;
  }

  ShmWorld& world_;
  const BarrierId id_;
  std::vector<const void*> inputs_;  // of one sum; the stream's
  std::vector<const Published*> published_;
};

}  // namespace

std::unique_ptr<Communicator> make_shm_communicator(DeviceContext& context, ShmWorld& world,
                                                    BarrierId id, std::string role,
                                                    StreamId stream) {
  return std::make_unique<ShmCommunicator>(context, world, id, std::move(role), stream);
}

}  // namespace tessera::comm
