// Bytes between ranks that do not see each other's memory: one communicator of MPI, used so that a
// rank which waits can be woken, and what it leaves behind can be cleared away.
//
//   rank 0   post ─ poll ─ poll ─ done        post ─ poll ─ failure: receives are cancelled
//   rank 1   post ─ poll ─ done               post ─ poll ─ failure     sends stay, for `drain`
//
// Sends leave from memory that only the channel has: MPI can't take back a message that a peer has
// begun to read, but what a user owns is never read after a collective has thrown.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/comm/processes/shm.hpp"

namespace tessera::comm {

// Between looks after MPI, `look` times so far: nothing wakes a thread that waits for it.
void pause_after(int look);

// Threads: one at a time.
class MpiChannel {
 public:
  // Over the ranks of `all`; collective. `out` outlives what is sent and not yet delivered.
  MpiChannel(MPI_Comm all, const ShmWorld& world, std::span<std::byte> out);
  MpiChannel(const MpiChannel&) = delete;
  MpiChannel& operator=(const MpiChannel&) = delete;

  // What is sent lies here, and stays as it is until `finish` returns.
  std::byte* out() const noexcept { return out_.data(); }
  std::size_t out_bytes() const noexcept { return out_.size(); }

  // Messages between two ranks arrive in the order in which they are posted.
  void receive(void* data, std::size_t bytes, int from);
  void send(const std::byte* data, std::size_t bytes, int to);
  // All that is posted is delivered. Polls, because nothing wakes a thread inside MPI when a peer
  // never comes.  Throws: CommError once the world is aborted; then what was to be received into is
  // the caller's again, unless its sender has stopped half-way.
  void finish();

  // Every rank of the world comes here after a failure, and at the end: what peers have sent to
  // collectives that were given up is thrown away, and with that all sends are delivered.
  // Throws: CommError when a rank dies meanwhile.
  void drain();
  // Collective. Requires: drained.
  void free() noexcept { MPI_Comm_free(&comm_); }

 private:
  void give_up();
  bool throw_away_from(int peer);

  MPI_Comm comm_ = MPI_COMM_NULL;
  const ShmWorld& world_;
  int rank_ = 0, size_ = 1;
  std::span<std::byte> out_;
  std::vector<std::byte> scrap_;  // what is thrown away
  std::vector<MPI_Request> sends_, receives_;
};

}  // namespace tessera::comm
