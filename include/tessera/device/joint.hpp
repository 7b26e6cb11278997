// A collective as the executors see it: one joint operation of `size` ranks, which starts on no
// rank before every rank's inputs are ready and ends on none while a peer may still touch its
// bytes.
//
//   rank 0  gather  ──publish────┐ all here ┌──run────┐ all done ┌── next operation
//   rank 1  gather  ─────publish─┘          └────run──┘          └── next operation
//
// A joint body is invoked twice: with Phase::publish it makes its pointers known to its peers, with
// Phase::run it pulls from them. A Joint belongs to one communicator and is used from one stream
// per rank, so its meetings come in order.
//
// On CUDA streams run behind their hosts. The hosts meet, and events carry the order to the device:
//
//   host 0    publish ─┐ meet ┌─ run ────────┐ meet ┌─ goes on      two meetings, no other wait
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

// Where the rank threads of one process wait for each other; `abort` wakes them all with a reason.
// One per world.
class Meeting {
 public:
  // Every `begin` and `end`, present and future until `rearm`, throws CommError with `reason`. The
  // first reason wins.
  void abort(const std::string& reason);
  // Ranks can meet again.  Requires: nobody is at a Joint; each Joint has been told as well.
  void rearm();
  bool aborted() const;
  std::string reason() const;

 private:
  friend class Joint;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::string reason_;
};

class Joint {
 public:
  Joint(Meeting& meeting, int size)
      : meeting_(meeting), size_(size), marks_(static_cast<std::size_t>(size)) {}

  int size() const noexcept { return size_; }
  Meeting& meeting() const noexcept { return meeting_; }

  // Before the run phase: sleeps until all `size` ranks are here.  Throws: CommError when the
  // meeting is aborted, at once.
  void begin();
  // After it, whether it threw or not: sleeps until all that began are here. An abort ends no wait:
  // a peer that is still pulling reads this rank's bytes.  Throws: CommError on all of them when
  // the meeting was aborted before the last came.
  void end();
  // The events of `rank` on CUDA, made by its executor. They live as long as the Joint: a peer may
  // be about to wait for them when the rank is gone.
  struct Marks {
    std::shared_ptr<void> ready, done;
  };
  Marks& marks(int rank) { return marks_.at(static_cast<std::size_t>(rank)); }

  // Forgets who had come to a meeting that was aborted.  Requires: as Meeting::rearm.
  void rearm();

 private:
  Meeting& meeting_;
  int size_;
  std::vector<Marks> marks_;  // by rank; a rank reads its peers' between two meetings
  int arrived_ = 0;           // at `begin`
  int inside_ = 0;            // between `begin` and `end`
  bool given_up_ = false;     // as the last one ended
  std::uint64_t round_ = 0;
};

}  // namespace tessera
