// What the parts of one rank of World::nccl share: NCCL, the store through which ranks say what
// NCCL can't, the native communicators, and the failure that ends all of them.
//
//   failing rank    reason ── store: "failures", then the reason ── abort all
//   its peers       ask "failures" every 200 ms ── the same reason ── abort all
//   store           hears that a process is gone ── reason ── abort all
//
// Threads: the rank's host thread makes and uses communicators, the watch thread asks and aborts; a
// mutex keeps their calls of NCCL apart.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/nccl/nccl_driver.hpp"
#include "runtime/comm/nccl/nccl_store.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class NcclWorld {
 public:
  // Joins the store and opens NCCL; all ranks agree that all have, on one version, each on a GPU of
  // its own, this one on `uuid`. `refused` is why this rank has none.
  NcclWorld(const ProcessSeat& seat, const WorldOptions& options, const std::string& uuid,
            const std::string& refused);
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int rank() const noexcept { return store_.seat().rank; }
  int size() const noexcept { return store_.seat().size; }
  const WorldOptions& options() const noexcept { return options_; }
  const kernels::NcclDriver& nccl() const noexcept { return *nccl_; }
  int version() const noexcept { return version_; }  // of NCCL: 22809

  NcclStore& store() noexcept { return store_; }
  std::chrono::milliseconds init_timeout() const;

  // --- native communicators, which `abort` takes away: null then.
  struct Comm {
    void* native = nullptr;
  };
  // Of all ranks of the world, by an id of this attempt.
  void join(Comm& made);
  // A part of `parent`, with who gives the same color. Collective over it.
  void split(Comm& parent, int color, int key, const kernels::NcclShape& shape, Comm& made,
             std::string_view what);
  // Queues what `calls` queues as one group. `is_first`: peers may not be here yet.
  template <class F>
  void group(Comm& comm, const char* what, bool is_first, const F& calls) {
    {
      const auto lock = lock_unless_failed();
      const Group open(*this);
      calls();
    }
    finish(comm, what, is_first);
  }
  // Inside of `group`.
  void check(kernels::NcclError error) const;
  // See NcclDriver::make_window; *window stays where it is. Collective over `comm`.
  void make_window(Comm& comm, void* data, std::int64_t bytes, void** window);
  void end_window(const Comm& comm, void* window) noexcept;
  // One of them, of which its ranks have ended all windows. Collective over it, and nothing is
  // under way. Throws as `free_all`.
  void free(Comm& comm);
  // In order, all ranks are here, and nothing is queued.  Throws: CommError where NCCL fails, or
  // takes longer than `init_timeout`.
  void free_all();

  // --- failure
  bool has_failed() const noexcept { return has_failed_.load(std::memory_order_acquire); }
  std::string reason() const;
  void expect_fine() const;          // Throws: `error`.
  std::exception_ptr error() const;  // a CommError with the reason; LostRank where one is lost
  std::string async_error() const;   // what NCCL has noticed of itself; empty for nothing
  // This rank fails, of itself: the first reason of all ranks becomes that of all.
  void fail(const std::string& reason);
  // Of the watch thread, in an attempt that may be over: whether a peer has failed, or is gone, or
  // a call of this rank is `late`; then all is aborted on return. `position` says where this rank
  // is, for a peer's message.
  void look(int attempt, const std::string& late, const std::function<std::string()>& position);
  // All ranks meet, idle, behind a failure that none of them ended with, and can make communicators
  // anew. Each of `largest` becomes the largest of all ranks.  Throws: CommError where one has.
  void begin_attempt(std::span<double> largest);
  int attempt() const noexcept { return store_.attempt(); }
  void
  abandon() noexcept;  // communicators that are left: of a world that was never whole, or failed
  // Called before communicators are aborted, which waits for graphs that hold calls on them.
  void set_drop_graphs(std::function<void(const std::string& why)> f) {
    drop_graphs_ = std::move(f);
  }

 private:
  using Clock = std::chrono::steady_clock;

  class Group {
   public:
    explicit Group(NcclWorld& world) : world_(world) { world.check(world.nccl_->begin()); }
    ~Group() noexcept(false);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

   private:
    NcclWorld& world_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  void agree(const std::string& uuid, const std::string& refused);
  std::unique_lock<std::mutex> lock_unless_failed() const;
  void finish(Comm& comm, std::string_view what, bool is_first);
  void abort(const std::string& reason, int attempt);  // nothing where that one is over
  void abort_all() noexcept;                           // with the lock

  const WorldOptions options_;
  const kernels::NcclDriver* nccl_ = nullptr;
  int version_ = 0;
  mutable std::mutex mutex_;  // of NCCL's calls
  std::vector<Comm*> comms_;  // in the order of making; null: under way, or failed
  std::function<void(const std::string&)> drop_graphs_;
  std::atomic<bool> has_failed_{false};
  mutable std::mutex reason_mutex_;
  std::string reason_;
  std::atomic<bool> is_late_{false};  // does somebody not come to a call of this rank
  Clock::time_point asked_{};
  NcclStore store_;
};

}  // namespace tessera::comm
