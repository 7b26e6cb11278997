// Ranks as processes of one machine that any launcher has started: they meet at rank 0's store,
// find each other's memory by what it tells them, and need it no more.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/processes/posix_memory.hpp"
#include "runtime/comm/processes/process_backend.hpp"
#include "runtime/comm/processes/shared_bootstrap.hpp"
#include "runtime/comm/store/message.hpp"
#include "runtime/comm/store/store.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/comm/lost_rank.hpp"
#include "tessera/comm/world.hpp"

namespace tessera {
namespace comm {
namespace {

using Clock = std::chrono::steady_clock;
using detail::with_rank;

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                  std::chrono::milliseconds(1));
}

// Each rank says one thing, and hears what all say. A rank that came and then says nothing is
// listed with all others that do.
std::vector<std::string> tell_all(detail::Store& store, const ProcessSeat& seat,
                                  Clock::time_point deadline, const std::string& key,
                                  const std::string& own) {
  store.set(concat(key, ' ', seat.rank), own);
  std::vector<std::string> all;
  std::vector<int> silent;
  for (int r = 0; r < seat.size; ++r) try {
      all.push_back(store.get(concat(key, ' ', r), left_until(deadline)));
    } catch (const LostRank&) {
      throw;
    } catch (const CommError&) {
      silent.push_back(r);
    }
  if (!silent.empty())
    throw with_rank(JoinError(concat("World::processes: of ", seat.size,
                                     " ranks these came to the store and have said nothing since: ",
                                     detail::describe_ranks(silent),
                                     "; their processes are stopped or starved")),
                    silent.front() == 0 ? seat.rank : 0);
  return all;
}

// "ranks 0 1 | 2 3", a group for each machine. Each rank has said who is the first that it sees.
std::string by_machine(const std::vector<std::string>& first_seen) {
  std::string text = "ranks";
  for (std::size_t first = 0; first < first_seen.size(); ++first) {
    if (first_seen[first] != std::to_string(first)) continue;
    if (first != 0) text += " |";
    for (std::size_t r = first; r < first_seen.size(); ++r)
      if (first_seen[r] == first_seen[first]) text += concat(' ', r);
  }
  return text;
}

// What all ranks find alike, so that one line of rank 0 is enough.
[[noreturn]] void refuse(const std::string& message) { throw with_rank(DataError(message), 0); }

// All are on one machine.
void expect_own_places(const std::vector<std::string>& given) {
  for (std::size_t r = 1; r < given.size(); ++r)
    if (const auto before = std::ranges::find(given, given[r]) - given.begin();
        !given[r].empty() && before < static_cast<std::ptrdiff_t>(r))
      refuse(concat("World::processes: ranks ", before, " and ", r, " of one machine both have ",
                    given[r], "; give each rank of a machine a number of its own"));
}

// Who shares a machine is tried: each rank makes its part of a board, and looks for the others'.
// A store has at most 64 MiB, so of all that a job exchanges only this goes through it.
std::unique_ptr<Bootstrap> come_together(const ProcessSeat& seat, double timeout_seconds) {
  const auto timeout =
      std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(timeout_seconds));
  const Clock::time_point deadline = Clock::now() + timeout;
  const auto store = detail::Store::join(detail::address_of(seat), seat.rank, timeout);
  std::random_device random;
  if (seat.rank == 0) store->set("token", std::to_string(std::uint64_t{random()} << 32 | random()));
  const std::uint64_t token = std::stoull(store->get("token", left_until(deadline)));
  auto board = std::make_unique<PosixMemory>(concat(token), seat.size, sizeof(BoardPart));
  const auto part = [&](int rank) -> BoardPart& {
    return *reinterpret_cast<BoardPart*>(board->bases()[static_cast<std::size_t>(rank)]);
  };
  std::string error;
  try {
    board->make(seat.rank);
    part(seat.rank).process = ProcessId::own();
    part(seat.rank).token = token;
  } catch (const CommError& refused) {
    error = refused.what();
  }
  const auto errors = tell_all(*store, seat, deadline, "error", error);
  for (std::size_t r = 0; r < errors.size(); ++r)
    if (!errors[r].empty()) throw with_rank(JoinError(concat("rank ", r, ": ", errors[r])), 0);
  int first = -1, seen = 0;
  try {
    for (int r = seat.size; r-- > 0;)
      if (board->map(r) && part(r).token == token) first = r, ++seen;
  } catch (const std::exception& refused) {
    store->last_words(refused.what());  // peers wait for what this rank would have said
    throw;
  }
  const auto first_seen = tell_all(*store, seat, deadline, "first", std::to_string(first));
  if (std::ranges::count(first_seen, "0") != seat.size)
    refuse(concat("World::processes: no /dev/shm is seen by all ", seat.size, " ranks (",
                  by_machine(first_seen),
                  "), so they are on several machines; between machines CPU ranks exchange through "
                  "MPI: start the job as mpirun -n ",
                  seat.size,
                  " PROGRAM with a build that has MPI, or run all ranks on one machine"));
  const auto seen_by = tell_all(*store, seat, deadline, "seen", std::to_string(seen));
  if (std::ranges::count(seen_by, std::to_string(seat.size)) != seat.size)
    refuse("World::processes: some ranks may not map the memory of others; run all as one user");
  expect_own_places(tell_all(*store, seat, deadline, "place", seat.local_rank_from));
  board->forget_names();
  return SharedBootstrap::world(std::move(board), seat.rank, token, timeout);
}

}  // namespace
}  // namespace comm

World World::processes(const ProcessSeat& seat, const WorldOptions& options) {
  comm::expect_process_options("World::processes", options);
  TESSERA_EXPECT(
      options.transport == Transport::automatic,
      "World::processes: processes of one machine send no messages; leave transport on automatic");
  TESSERA_EXPECT(seat.size >= 1 && seat.rank >= 0 && seat.rank < seat.size,
                 "World::processes: rank ", seat.rank, " of ", seat.size,
                 "; give a rank from 0 to size - 1");
  TESSERA_EXPECT(options.init_timeout_seconds > 0 && options.init_timeout_seconds < 1e9,
                 "World::processes: init_timeout_seconds is ", options.init_timeout_seconds,
                 "; give a number of seconds above 0");
  auto all = comm::come_together(seat, options.init_timeout_seconds);
  std::vector<int> hosts(static_cast<std::size_t>(seat.size));  // behind what refuses a huge one
  auto backend = std::make_unique<comm::ProcessBackend>(std::move(all), std::move(hosts), options);
  backend->watch(options);
  const int threads = threads_per_rank(options, backend->ranks_on_my_cores());
  return World(std::make_unique<State>(WorldKind::processes, seat.rank, seat.size, options, threads,
                                       std::move(backend)));
}

}  // namespace tessera
