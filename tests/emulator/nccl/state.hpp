// What the double knows: its settings, its communicators, and what each has been told.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/emulator/control.hpp"
#include "tests/emulator/nccl/board.hpp"

namespace tessera::nccl_double {

using kernels::cuda::emulator::Control;

// ---- of the process

struct Settings {
  std::atomic<long long> version{NCCL_VERSION_CODE}, polls{1}, null_windows{0}, one_gpu{0},
      any_order{0}, lone_aborts{0}, stuck_aborts{0}, stuck_ends{0}, host_ms{0}, spoil{0};
};
Settings& settings();

struct Totals {
  std::atomic<long long> kernels, calls, communicators, windows, graphs, bytes, moved, held,
      zero_ctas, sums, windowed_sums;
  std::atomic<long long> queued[16];  // kernels of each GPU that have not ended
};
Totals& totals();

// The emulated GPU's module that this process has loaded. Null where it has none.
const Control* emulator();
void* emulated_module();

// What tessera_nccl_double_break asked of this rank's next kernel, which counts it.
struct Fault {
  bool stalls;
  ncclResult_t result;
};
Fault next_fault(int rank);
// What tessera_nccl_double_refuse asked of this call; ncclSuccess: nothing.
ncclResult_t refused(const char* function);

// A string that lasts as long as the process.
const char* kept(const std::string& line);
// Notes `line` as the calling thread's last error, and returns `result`.
ncclResult_t fail(ncclResult_t result, const std::string& line);
const char* last_error();

// ---- calls

enum class Kind : std::int32_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  all_to_all,
  send,
  receive
};

struct Call {
  Kind kind;
  const void* send;
  void* recv;
  std::size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op;
  int peer;  // of a send or a receive, the root of a broadcast; -1: none
  // Where it lies in windows of its communicator, both sides; 0: not in windows.
  std::uint64_t place = 0;
};

// ---- communicators

// How often a rank has launched on each communicator that comes of one id.
struct Lineage {
  int rank;  // in the first of them
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> launches;  // by the hash of a board's name
  bool is_captured = false;  // once a call was: nobody counts what graphs launch from then on
};

// Polled until it says something else than ncclInProgress.
using Job = std::function<ncclResult_t()>;

inline constexpr int kMostCtas = 8;  // where no configuration says less

struct Comm {
  ncclComm_t handle = nullptr;
  std::shared_ptr<Board> board;
  std::shared_ptr<Lineage> lineage;
  std::uint64_t hash = 0;
  int rank = 0, ranks = 0, device = 0, ctas = kMostCtas;
  void* memory = nullptr;  // on its GPU, from the time when all ranks have come
  bool blocks = true;

  // Of the host.
  std::mutex host;
  std::vector<Job> jobs;  // pending ones; empty where the communicator is ready
  long long polls = 0;    // answers that are due before they are done
  bool is_finalized = false;
  std::uint64_t steps_planned = 0, steps_done = 0;
  std::uint64_t windows_made = 0;
  std::atomic<ncclResult_t> result{ncclSuccess};
  std::atomic<const char*> error{nullptr};

  // Of its kernels.
  std::atomic<bool> is_aborted{false};
  std::atomic<long long> queued{0}, graphs{0};
  std::mutex turns;
  std::condition_variable turned;
  std::uint64_t launched = 0, turn = 0;
  bool is_busy = false;

  // Names the broken rule, and leaves the communicator to be aborted.
  void break_by(ncclResult_t why, const std::string& line);
  std::string name() const;  // "rank 1 of 4"
  Slot& slot() const { return board->slot(rank); }
};

// A handle that no other communicator ever had.
ncclComm_t add(std::shared_ptr<Comm> comm);
void remove(ncclComm_t handle);
// Null, and the error noted, where this is no communicator.
std::shared_ptr<Comm> find(ncclComm_t handle, const char* function);
// The same, and it is ready for another call; else `*why` says what to return.
std::shared_ptr<Comm> ready(ncclComm_t handle, const char* function, ncclResult_t* why);

// ---- groups

// Does `job` now, or at the group's end; a communicator that does not block leaves it to its polls.
// `blocks`: the caller sleeps whatever the communicator is, as in an abort.
ncclResult_t submit(const std::shared_ptr<Comm>& comm, Job job, bool blocks = false);
// Polls until all are done, or a peer has not come within `host_ms`.
ncclResult_t finish(std::vector<Job> jobs);
// Adds a call to the kernel that the group's end launches on `stream`.
ncclResult_t submit(const std::shared_ptr<Comm>& comm, const Call& call, cudaStream_t stream);

// A call that fails within a group fails the group.
ncclResult_t in_group(ncclResult_t result);

// ---- memory

// What a communicator holds on its GPU: so much for each of its CTAs.
inline constexpr std::int64_t kBytesOfCta = std::int64_t{1} << 16;
ncclResult_t take_memory(Comm& comm);
void give_memory(Comm& comm);

// Those of a communicator that ends.
void end_windows(const Comm& comm);
// Of a call that NCCL does over windows where both sides lie in one: which these are, and how far
// into them lies what peers read or write. 0 where one side does not, and for other calls.
std::uint64_t place_of(const Call& call, const Comm& comm, std::size_t element_bytes);

}  // namespace tessera::nccl_double
