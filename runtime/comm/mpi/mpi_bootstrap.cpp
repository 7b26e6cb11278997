#include "runtime/comm/mpi/mpi_bootstrap.hpp"

#include <mutex>
#include <utility>

#include "runtime/comm/mpi/mpi.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/testing.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::comm {

// MPI starts and ends once in a process: with the first world, unless the program has started it,
// and with the last.
class MpiSession {
 public:
  MpiSession() {
    Life& life = process();
    const std::lock_guard lock(life.mutex);
    int initialized = 0, finalized = 0, provided = 0;
    check(MPI_Initialized(&initialized), "MPI_Initialized");
    check(MPI_Finalized(&finalized), "MPI_Finalized");
    if (finalized)
      throw CommError(
          "World::mpi: MPI has ended in this process, with its last world; keep one world alive "
          "while others come and go");
    if (!initialized) {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
      life.is_ours = true;
    }
    check(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_MULTIPLE)
      throw CommError(concat("World::mpi: MPI grants thread level ", provided,
                             ", but streams call it from threads of their own; start it with "
                             "MPI_THREAD_MULTIPLE"));
    ++life.worlds;
  }
  ~MpiSession() { end(false); }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  // The world is gone; the first call counts. Unless all its ranks `met` at its end, MPI is left
  // running, because a peer may never come to MPI_Finalize.
  void end(bool met) noexcept {
    Life& life = process();
    const std::lock_guard lock(life.mutex);
    if (std::exchange(has_ended_, true)) return;
    if (--life.worlds == 0 && life.is_ours && met) MPI_Finalize();
  }

 private:
  struct Life {
    std::mutex mutex;
    int worlds = 0;
    bool is_ours = false;
  };
  static Life& process() {
    static Life life;
    return life;
  }

  bool has_ended_ = false;
};

namespace {

std::vector<int> pretended_hosts;  // by rank; empty: none

// MPI aligns to whatever its own header leaves, so a page more is asked for; mappings start at
// pages, so every process comes to the same address.
class MpiMemory final : public SharedMemory {
 public:
  MpiMemory(MPI_Comm comm, std::int64_t bytes);
  void free() noexcept override { MPI_Win_free(&win_); }

 private:
  MPI_Win win_ = MPI_WIN_NULL;
};

MpiMemory::MpiMemory(MPI_Comm comm, std::int64_t bytes) {
  const std::int64_t asked = round_up(bytes, kPageBytes) + kPageBytes;
  MPI_Info info = MPI_INFO_NULL;
  check(MPI_Info_create(&info), "MPI_Info_create");
  MPI_Info_set(info, "alloc_shared_noncontig", "true");
  void* mine = nullptr;
  const int made = MPI_Win_allocate_shared(asked, 1, info, comm, static_cast<void*>(&mine), &win_);
  MPI_Info_free(&info);
  check(made, "MPI_Win_allocate_shared (is /dev/shm large enough?)");
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  for (int r = 0; r < size; ++r) {
    MPI_Aint there = 0;
    int unit = 0;
    void* base = nullptr;
    check(MPI_Win_shared_query(win_, r, &there, &unit, static_cast<void*>(&base)),
          "MPI_Win_shared_query");
    if (there < asked)
      throw CommError(concat("World::mpi: MPI gives rank ", r, " ", there, " bytes of ", asked,
                             "; use another MPI or Transport::messages"));
    auto* const start = static_cast<std::byte*>(base);
    const auto beyond = reinterpret_cast<std::uintptr_t>(base) % kPageBytes;
    bases_.push_back(beyond == 0 ? start : start + (kPageBytes - beyond));
  }
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

}  // namespace

std::unique_ptr<MpiBootstrap> MpiBootstrap::world() {
  auto session = std::make_unique<MpiSession>();
  MPI_Comm all = MPI_COMM_NULL;
  check(MPI_Comm_dup(MPI_COMM_WORLD, &all), "MPI_Comm_dup");
  return std::unique_ptr<MpiBootstrap>(new MpiBootstrap(all, std::move(session)));
}

MpiBootstrap::MpiBootstrap(MPI_Comm comm, std::unique_ptr<MpiSession> session)
    : Bootstrap(rank_in(comm), size_of(comm)), session_(std::move(session)), comm_(comm) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
}

MpiBootstrap::~MpiBootstrap() = default;

void MpiBootstrap::meet() { check(MPI_Barrier(comm_), "MPI_Barrier"); }

void MpiBootstrap::exchange(std::span<const std::byte> own, std::byte* all) {
  const auto bytes = static_cast<int>(own.size());
  check(MPI_Allgather(own.data(), bytes, MPI_BYTE, all, bytes, MPI_BYTE, comm_), "MPI_Allgather");
}

std::unique_ptr<Bootstrap> MpiBootstrap::split(int number, int order) {
  MPI_Comm some = MPI_COMM_NULL;
  check(MPI_Comm_split(comm_, number < 0 ? MPI_UNDEFINED : number, order, &some), "MPI_Comm_split");
  if (some == MPI_COMM_NULL) return nullptr;
  return std::unique_ptr<Bootstrap>(new MpiBootstrap(some));
}

std::unique_ptr<SharedMemory> MpiBootstrap::share(std::int64_t bytes) {
  return std::make_unique<MpiMemory>(comm_, bytes);
}

void MpiBootstrap::free() noexcept {
  MPI_Comm_free(&comm_);
  if (session_) session_->end(true);
}

std::vector<int> MpiBootstrap::hosts() {
  MPI_Comm machine = MPI_COMM_NULL, host = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &machine),
        "MPI_Comm_split_type");
  check(MPI_Comm_split(machine, PretendedHosts::host_of(rank()), rank(), &host), "MPI_Comm_split");
  int first = rank();
  check(MPI_Bcast(&first, 1, MPI_INT, 0, host), "MPI_Bcast");
  MPI_Comm_free(&host);
  MPI_Comm_free(&machine);
  return Bootstrap::exchange(first);
}

std::unique_ptr<SharedMemory> share_with_nobody(std::int64_t bytes) {
  return std::make_unique<MpiMemory>(MPI_COMM_SELF, bytes);
}

PretendedHosts::PretendedHosts(std::vector<int> hosts) { pretended_hosts = std::move(hosts); }
PretendedHosts::~PretendedHosts() { pretended_hosts.clear(); }
int PretendedHosts::host_of(int rank) {
  return pretended_hosts.empty() ? 0 : pretended_hosts.at(static_cast<std::size_t>(rank));
}

}  // namespace tessera::comm
