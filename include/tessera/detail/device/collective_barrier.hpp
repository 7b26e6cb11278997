// How the ranks of one process meet in a collective. It starts on no rank before every rank's
// inputs are ready, and ends on none while a peer may still touch its bytes (a double barrier).
//
//   rank 0  gather  ──publish────┐ enter ┌──run────┐ leave ┌── next operation
//   rank 1  gather  ─────publish─┘       └────run──┘       └── next operation
//
// The body of a collective is invoked twice: with Phase::publish it makes its pointers known to its
// peers, with Phase::run it pulls from them. A CollectiveBarrier belongs to one communicator and is
// used from one stream per rank, so its rounds come in order.
//
// On CUDA streams run behind their hosts. The hosts pass the barrier, and events carry the order to
// the device:
//
//   host 0    publish ─┐enter ┌─ run ─────────┐ leave ┌─ goes on     the host blocks nowhere else
//   stream 0  ─ready 0─┼──────┼─ ready 1? pull ─ done 0 ─┼─ done 1? ─ next operation
//   stream 1  ─ready 1─┴──────┴─ ready 0? pull ─ done 1 ─┴─ done 0? ─ next operation
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera {

// Ends every wait of the rank threads of a world, with a reason. Shared by the barriers of all its
// communicators.
class AbortSignal {
 public:
  // Every `enter` and `leave`, present and future until `rearm`, throws CommError with `reason`.
  // The first reason wins.
  void abort(const std::string& reason);
  // Says why barriers are given up from now on, where one is: see CollectiveBarrier.
  void explain(const std::string& reason);
  // Barriers work again.  Requires: no thread is at one; CollectiveBarrier::rearm is done on each.
  void rearm();
  bool is_final() const;  // by `abort`
  bool aborted() const;   // or explained
  std::string reason() const;

 private:
  friend class CollectiveBarrier;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false, is_final_ = false;
  std::string reason_;
};

class CollectiveBarrier {
 public:
  CollectiveBarrier(AbortSignal& abort_signal, int size)
      : abort_signal_(abort_signal),
        size_(size),
        marks_(static_cast<std::size_t>(size)),
        members_(static_cast<std::size_t>(size)) {}

  int size() const noexcept { return size_; }
  AbortSignal& abort_signal() const noexcept { return abort_signal_; }

  // Before the run phase: blocks until all `size` ranks have published.  Throws: CommError once the
  // round is given up, at once.
  void enter();
  // After the run phase, also when the phase threw: blocks until every rank that has entered is
  // here. Giving up does not cut this short, because a peer may still be reading this rank's
  // buffer. Throws: CommError on all of them when one gave up before the last one came.
  void leave();
  // A rank comes to no round any more: this one is given up, and all that follow.
  void give_up(const std::string& reason);
  // A member, counted from 0, has failed: of the rounds to come only its first `committed` ones,
  // counted from the last `rearm`, wait for it.
  void commit(int member, std::uint64_t rounds);
  void halt(int member);
  // For an executor that brings the ranks together itself: whether the next round is given up, and
  // that it is over.
  bool is_given_up() const;
  void pass();
  // The events of a rank of the world on CUDA, made by its executor. They live as long as the
  // barrier: a peer may be about to wait for them when the rank is gone.
  struct Marks {
    int rank = -1;
    std::shared_ptr<void> ready{}, done{};
  };
  // Those of `rank`, one of `size`, which are there from its first call on.
  Marks& marks_of(int rank);
  // Those of all ranks, between `enter` and `leave`.
  const std::vector<Marks>& marks() const noexcept { return marks_; }

  // Forgets who had come to a round that was aborted.  Requires: as AbortSignal::rearm.
  void rearm();

 private:
  struct Member {
    std::uint64_t committed = 0;
    bool has_halted = false;
  };
  bool gives_up() const;  // with the lock
  [[noreturn]] void throw_given_up() const;

  AbortSignal& abort_signal_;
  int size_;
  std::vector<Marks> marks_;  // in the order in which ranks have come
  std::vector<Member> members_;
  int arrived_ = 0;          // at `enter`
  int inside_ = 0;           // between `enter` and `leave`
  bool is_broken_ = false;   // a rank comes no more
  bool given_up_ = false;    // as the last one left
  std::uint64_t round_ = 0;  // those that are over, since the last `rearm`
};

}  // namespace tessera
