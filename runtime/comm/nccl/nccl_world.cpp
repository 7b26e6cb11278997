#include "runtime/comm/nccl/nccl_world.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>
#include <utility>

#include "runtime/base/wait.hpp"
#include "runtime/comm/nccl/nccl_abort.hpp"
#include "runtime/comm/nccl/nccl_library.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/comm/lost_rank.hpp"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using detail::with_rank;

constexpr auto kAskEvery = 200ms;  // whether a peer has failed
constexpr auto kLateFor = 500ms;   // once the time of a call is over

}  // namespace

// ---- Coming together

NcclWorld::NcclWorld(const ProcessSeat& seat, const WorldOptions& options, const std::string& uuid,
                     const std::string& refused)
    : options_(options), store_(seat, init_timeout()) {
  agree(uuid, refused);
  store_.watch(options.heartbeat_timeout_seconds);
}

void NcclWorld::agree(const std::string& uuid, const std::string& refused) {
  kernels::NcclLibrary library{};
  std::string error = refused;
  if (error.empty()) try {
      nccl_ = &open_nccl(options_.nccl, library);
    } catch (const CommError& absent) {
      error = absent.what();
    }
  version_ = library.version;
  const std::string own[] = {error, nccl_version(version_), library.file, uuid,
                             store_.seat().local_rank_from};
  const std::vector<std::string> said = store_.tell_all("the first exchange", store_.all_ranks(),
                                                        NcclStore::pack(own), init_timeout());
  std::vector<std::vector<std::string>> ranks;
  for (const std::string& text : said) ranks.push_back(NcclStore::unpack(text));
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (!ranks[r][0].empty())
      throw JoinError(error == ranks[r][0] ? error : concat("rank ", r, ": ", ranks[r][0]));
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    if (ranks[r][1] != ranks[0][1])
      throw with_rank(JoinError(concat("World::nccl: rank 0 has NCCL ", ranks[0][1], " (",
                                       ranks[0][2], "), rank ", r, " has ", ranks[r][1], " (",
                                       ranks[r][2], "); give all ranks the same")),
                      0);
    for (std::size_t before = 0; before < r; ++before) {
      if (ranks[before][3] != ranks[r][3]) continue;
      const std::string both =
          concat("World::nccl: ranks ", before, " and ", r, " are both on ", ranks[r][3]);
      if (!ranks[r][4].empty() && ranks[before][4] == ranks[r][4])
        throw with_rank(DataError(concat(both, ", by ", ranks[r][4],
                                         " of each; give each rank of "
                                         "a machine a number of its own")),
                        0);
      throw with_rank(JoinError(concat(both, "; give each process a GPU of its own")), 0);
    }
  }
}

std::chrono::milliseconds NcclWorld::init_timeout() const {
  return std::chrono::ceil<std::chrono::milliseconds>(
      std::chrono::duration<double>(options_.init_timeout_seconds));
}

// ---- Native communicators

NcclWorld::Group::~Group() noexcept(false) {
  const kernels::NcclError error = world_.nccl_->end();
  if (std::uncaught_exceptions() == exceptions_) world_.check(error);
}

void NcclWorld::check(kernels::NcclError error) const {
  if (error) throw CommError(concat("rank ", rank(), ": ", error));
}

// For a call of NCCL's.  Throws: CommError with the reason, also while an abort has the lock, which
// may wait for the graph that the caller captures.
std::unique_lock<std::mutex> NcclWorld::lock_unless_failed() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (expect_fine(); !lock.owns_lock(); expect_fine())
    if (!lock.try_lock()) std::this_thread::sleep_for(50us);
  return lock;
}

void NcclWorld::join(Comm& made) {
  kernels::NcclId id{};
  if (rank() == 0) check(nccl_->make_id(&id));
  const std::string told = store_.from_first("id", {id.bytes, sizeof id.bytes}, init_timeout());
  std::memcpy(id.bytes, told.data(), std::min(told.size(), sizeof id.bytes));
  {
    const auto lock = lock_unless_failed();
    check(nccl_->join(&id, size(), rank(), &made.native));
    comms_.push_back(&made);
  }
  finish(made, "the ranks' coming together", true);
}

void NcclWorld::split(Comm& parent, int color, int part_key, const kernels::NcclShape& shape,
                      Comm& made, std::string_view what) {
  {
    const auto lock = lock_unless_failed();
    comms_.push_back(&made);  // before it is there, so that an abort finds what is made late
    check(nccl_->split(parent.native, color, part_key, &shape, &made.native));
  }
  finish(parent, what, true);
  finish(made, what, true);
}

void NcclWorld::make_window(Comm& comm, void* data, std::int64_t bytes, void** window) {
  {
    const auto lock = lock_unless_failed();
    check(nccl_->make_window(comm.native, data, bytes, window));
  }
  try {
    finish(comm, "ncclCommWindowRegister", true);
  } catch (const std::exception& error) {
    // NCCL may write *window until its communicator is gone, and who holds it frees it now.
    fail(error.what());
    abandon();
    throw;
  }
}

void NcclWorld::end_window(const Comm& comm, void* window) noexcept {
  const std::lock_guard lock(mutex_);
  const char* const error = comm.native ? nccl_->end_window(comm.native, window) : nullptr;
  if (error) log(LogLevel::warning, concat("World::nccl: rank ", rank(), ": ", error));
}

void NcclWorld::finish(Comm& comm, std::string_view what, bool is_first) {
  const double patience = is_first ? options_.init_timeout_seconds : options_.timeout_seconds;
  const auto start = Clock::now();
  std::string error;
  bool is_late = false;
  for (int look = 0; error.empty(); ++look) {
    bool is_busy = false;
    {
      const auto lock = lock_unless_failed();
      if (const char* const why = nccl_->poll(comm.native, &is_busy)) error = why;
    }
    if (!is_busy && error.empty()) return;
    is_late =
        error.empty() && std::chrono::duration<double>(Clock::now() - start).count() > patience;
    if (is_late) error = concat(what, " has taken ", patience, " s; not all ranks have come to it");
    if (look < 64)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(200us);
  }
  const auto until = Clock::now() + (is_late ? kLateFor : kReasonWithin);
  while (Clock::now() < until) {
    expect_fine();  // the watch thread knows better
    std::this_thread::sleep_for(10ms);
  }
  const std::string message = concat("rank ", rank(), ": ", error);
  if (is_late) throw LostRank(message);
  throw CommError(message);
}

// The watch thread looks after it, and aborts it with the others.
void NcclWorld::free(Comm& comm) {
  if (drop_graphs_) drop_graphs_("a communicator that it calls is made anew");
  {
    const auto lock = lock_unless_failed();
    check(nccl_->finalize(comm.native));
  }
  finish(comm, "ncclCommFinalize", true);
  const auto lock = lock_unless_failed();
  std::erase(comms_, &comm);
  check(nccl_->destroy(std::exchange(comm.native, nullptr)));
}

// A peer that is gone is heard of through the store. NCCL's destroy has no deadline, so a watchdog
// looks at that.
void NcclWorld::free_all() {
  const auto until = Clock::now() + init_timeout();
  const std::lock_guard lock(mutex_);
  const Wait wait("NCCL, to free its communicators", [] { return 0; });
  for (; !comms_.empty(); comms_.pop_back()) {
    void*& native = comms_.back()->native;
    if (!native) continue;  // of a split that failed
    check(nccl_->finalize(native));
    for (bool is_busy = true;; std::this_thread::sleep_for(200us)) {
      check(nccl_->poll(native, &is_busy));
      if (!is_busy) break;
      store_.expect_nobody_lost();
      if (Clock::now() > until)
        throw CommError(concat("rank ", rank(), ": NCCL has not freed its communicators in ",
                               options_.init_timeout_seconds, " s"));
    }
    check(nccl_->destroy(std::exchange(native, nullptr)));
  }
}

// ---- Failure

std::string NcclWorld::reason() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

// Of a rank that is lost or late each of the others says at once what it knows.
std::exception_ptr NcclWorld::error() const {
  const std::lock_guard lock(reason_mutex_);
  return is_late_ || store_.is_lost() ? std::make_exception_ptr(LostRank(reason_))
                                      : std::make_exception_ptr(CommError(reason_));
}

void NcclWorld::expect_fine() const {
  if (has_failed()) std::rethrow_exception(error());
}

void NcclWorld::fail(const std::string& why) {
  const int now = attempt();
  if (!has_failed()) abort(store_.first_reason(why, false, now), now);
}

std::string NcclWorld::async_error() const {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  bool is_busy = false;
  if (lock.owns_lock())
    for (Comm* comm : comms_) {
      void* const native = std::atomic_ref(comm->native).load();
      const char* const error = native ? nccl_->poll(native, &is_busy) : nullptr;
      if (error) return concat("rank ", rank(), ": ", error);
    }
  return "";
}

void NcclWorld::look(int now, const std::string& late,
                     const std::function<std::string()>& position) {
  if (has_failed()) return;
  is_late_ = !late.empty();
  std::string why = store_.departed();
  if (why.empty()) why = async_error();
  if (!why.empty()) return abort(store_.first_reason(why, false, now), now);
  if (!late.empty()) return abort(store_.first_reason(late, true, now), now);
  if (Clock::now() - asked_ < kAskEvery) return;
  asked_ = Clock::now();
  if (store_.failure(now, position, why)) abort(why, now);
}

// Who asked the store may come back when the world has recovered: a new attempt goes on.
void NcclWorld::abort(const std::string& why, int attempt) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (has_failed() || this->attempt() != attempt) return;
    reason_ = why;
    has_failed_.store(true, std::memory_order_release);
  }
  const std::lock_guard lock(mutex_);
  if (this->attempt() == attempt) abort_all();
}

// All at once, in one group: one by one they may wait for peers that wait for another one. The
// second pass is for what a split has made meanwhile: NCCL's own thread writes it, and is done once
// the parent is gone.
void NcclWorld::abort_all() noexcept {
  if (comms_.empty()) return;
  const std::string failure = reason(),
                    why = failure.empty() ? "its world ends, or begins anew" : failure;
  abort_in_time(why, [&] {
    if (drop_graphs_) drop_graphs_(why);
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<void*> natives;
      for (Comm* comm : comms_)
        if (void* const native = std::atomic_ref(comm->native).exchange(nullptr))
          natives.push_back(native);
      const char* const error =
          natives.empty() ? nullptr
                          : nccl_->abort(natives.data(), static_cast<std::int32_t>(natives.size()));
      if (error) log(LogLevel::warning, concat("World::nccl: rank ", rank(), ": ", error));
    }
  });
  comms_.clear();
}

void NcclWorld::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  abort_all();
}

void NcclWorld::begin_attempt(std::span<double> largest) {
  store_.expect_nobody_lost();
  const std::string_view own(reinterpret_cast<const char*>(largest.data()), largest.size_bytes());
  const std::vector<std::string> all =
      store_.tell_all("the recovery", store_.all_ranks(), std::string(own), init_timeout());
  for (const std::string& told : all)
    for (std::size_t i = 0; i < largest.size() && told.size() == own.size(); ++i) {
      double number;
      std::memcpy(&number, told.data() + i * sizeof number, sizeof number);
      largest[i] = std::max(largest[i], number);
    }
  const std::scoped_lock lock(mutex_, reason_mutex_);
  store_.begin_attempt();
  reason_.clear();
  is_late_ = false;
  has_failed_.store(false, std::memory_order_release);
}

}  // namespace tessera::comm
