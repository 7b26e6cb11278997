// The calls of the system by which folders are written, as one suite's program has them in the
// place of the C library's: below a folder they are counted on each rank, kept, and one of them
// fails. There fsync does nothing, so that a thousand saves take seconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

enum class CallKind : std::uint8_t {
  open,
  create,
  mkdir,
  write,
  sync,
  rename,
  close,
  lock,
  remove
};

struct SystemCall {
  CallKind kind{};
  int rank = 0;
  std::string path{}, to{};  // of the file or folder; where it is renamed to
  std::int64_t offset = 0;
  std::string bytes{};  // that were written
};

// What befalls one call.
struct CallFault {
  int rank = 0;
  std::size_t at = 0;     // the how-manieth call of that rank, from 1 on; 0: none
  int error = 0;          // errno of a call that does nothing
  bool is_short = false;  // half is written
  bool is_empty = false;  // nothing is written, which is no error
  int signal = 0;         // that the process is sent before it
  int slow_ms = 0;        // how much longer each write of the rank takes
  int slow_sync_ms = 0;   // likewise each fsync
  int thread_error = 0;   // of each thread that the rank would start
};

// Watches the calls below a folder; one at a time.
class CallWatch {
 public:
  explicit CallWatch(std::string folder, const CallFault& fault = {});
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;
  ~CallWatch();

  // The calling thread is this rank, and those that it starts; calls of threads that are none pass
  // by.
  static void set_rank(int rank);
  // All threads are this rank that say nothing else, and begin later; the calling one, too.
  static void set_rank_of_process(int rank);
  // Those that succeeded, in their order over all ranks.
  const std::vector<SystemCall>& calls() const { return calls_; }
  // Those of one rank, in its order: fault.at counts these.
  std::vector<SystemCall> calls_of(int rank) const;

 private:
  friend struct WatchedCall;

  std::string folder_;
  CallFault fault_;
  std::vector<std::size_t> counts_;
  std::vector<SystemCall> calls_;
};

}  // namespace tessera::testing
