#include "runtime/comm/mpi/mpi_channel.hpp"

#include <sched.h>

#include <chrono>
#include <thread>

#include "runtime/comm/mpi/mpi.hpp"

namespace tessera::comm {
namespace {

enum Tag : int { kData, kLast };  // kLast: this rank sends no more before the others have drained

// Then a waiting thread gives its core away for longer than a time slice takes to come round.
constexpr int kPolls = 1000;

// A cancelled receive that has begun ends as soon as its sender looks after MPI again, which it
// does on its way out.
constexpr std::chrono::seconds kCancelPatience{10};
constexpr std::chrono::seconds kDrainPatience{30};  // all ranks are there already

bool are_done(std::vector<MPI_Request>& requests) {
  int done = 0;
  check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
  if (done) requests.clear();
  return done != 0;
}

}  // namespace

void pause_after(int look) {
  if (look < kPolls)
    sched_yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

MpiChannel::MpiChannel(MPI_Comm all, const ShmWorld& world, std::span<std::byte> out)
    : world_(world), out_(out) {
  check(MPI_Comm_dup(all, &comm_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  sends_.reserve(static_cast<std::size_t>(size_));
  receives_.reserve(static_cast<std::size_t>(size_));
}

void MpiChannel::receive(void* data, std::size_t bytes, int from) {
  check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kData, comm_,
                  &receives_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Irecv");
}

void MpiChannel::send(const std::byte* data, std::size_t bytes, int to) {
  check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kData, comm_,
                  &sends_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Isend");
}

void MpiChannel::finish() {
  for (int look = 0;; pause_after(look++)) {
    if (world_.is_aborted()) {  // first: what a peer has sent before it gave up is worth nothing
      give_up();
      world_.expect_fine();
    }
    const bool received = are_done(receives_), sent = are_done(sends_);
    if (received && sent) return;
  }
}

// MPI must not write to memory that its caller, on the way out, gives back.
void MpiChannel::give_up() {
  for (MPI_Request& request : receives_)
    if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  const auto start = std::chrono::steady_clock::now();
  for (int look = 0; !are_done(receives_); pause_after(look++))
    if (world_.has_lost() || std::chrono::steady_clock::now() - start > kCancelPatience) return;
}

// True when the peer has said its last.
bool MpiChannel::throw_away_from(int peer) {
  int found = 0, bytes = 0;
  MPI_Message message;
  MPI_Status status;
  check(MPI_Improbe(peer, MPI_ANY_TAG, comm_, &found, &message, &status), "MPI_Improbe");
  if (!found) return false;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  scrap_.resize(static_cast<std::size_t>(bytes));
  check(MPI_Imrecv(scrap_.data(), bytes, MPI_BYTE, &message,
                   &receives_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Imrecv");
  for (int look = 0; !are_done(receives_); pause_after(look++))
    if (world_.has_lost()) world_.expect_fine();
  return status.MPI_TAG == kLast;
}

void MpiChannel::drain() {
  if (!receives_.empty())
    throw CommError(
        "World::recover: a receive of MPI that was cancelled does not end, because its sender has "
        "not come back to MPI; end the job, and start it again from a checkpoint");
  std::vector<int> open;  // peers that have not said their last
  for (int step = 1; step < size_; ++step) {
    open.push_back((rank_ + step) % size_);
    check(MPI_Isend(nullptr, 0, MPI_BYTE, open.back(), kLast, comm_,
                    &sends_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Isend");
  }
  const auto start = std::chrono::steady_clock::now();
  for (int look = 0;; pause_after(look++)) {
    std::erase_if(open, [&](int peer) { return throw_away_from(peer); });
    if (are_done(sends_) && open.empty()) return;
    if (world_.has_lost()) world_.expect_fine();
    if (std::chrono::steady_clock::now() - start > kDrainPatience)
      throw CommError("World: a peer that was here has gone before all messages were delivered");
  }
}

}  // namespace tessera::comm
