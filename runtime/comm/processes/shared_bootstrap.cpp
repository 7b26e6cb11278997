#include "runtime/comm/processes/shared_bootstrap.hpp"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "runtime/comm/processes/posix_memory.hpp"
#include "runtime/comm/store/message.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/lost_rank.hpp"

namespace tessera::comm {
namespace {

// Then a waiting rank gives its core away for longer than a time slice takes to come round.
constexpr int kLooksAwake = 1000;
constexpr int kLooksForTheDead = 100;  // of its naps one in so many

// What goes wrong in `body`, for all ranks to hear.
template <class F>
std::string error_of(const F& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Peers::Peers(std::span<BoardPart* const> parts) {
  for (const BoardPart* const part : parts) {
    ids_.push_back(part->process);
    pidfds_.push_back(part->process.open());
  }
}

Peers::~Peers() {
  for (const int fd : pidfds_)
    if (fd >= 0) close(fd);
}

bool Peers::has_ended(int rank) const noexcept {
  const int fd = pidfds_[static_cast<std::size_t>(rank)];
  pollfd one{.fd = fd, .events = POLLIN, .revents = 0};
  return fd < 0 ? ids_[static_cast<std::size_t>(rank)].is_gone() : poll(&one, 1, 0) == 1;
}

std::unique_ptr<SharedBootstrap> SharedBootstrap::world(std::unique_ptr<SharedMemory> board,
                                                        int rank, std::uint64_t token,
                                                        std::chrono::duration<double> timeout) {
  std::shared_ptr<Job> job(new Job{token, timeout, [] {}, Peers(views<BoardPart>(*board))});
  std::vector<int> members(board->bases().size());
  std::iota(members.begin(), members.end(), 0);
  return std::unique_ptr<SharedBootstrap>(
      new SharedBootstrap(std::move(job), std::move(board), "all", std::move(members), rank));
}

SharedBootstrap::SharedBootstrap(std::shared_ptr<Job> job, std::unique_ptr<SharedMemory> board,
                                 std::string name, std::vector<int> members, int rank)
    : Bootstrap(rank, static_cast<int>(members.size())),
      job_(std::move(job)),
      board_(std::move(board)),
      parts_(views<BoardPart>(*board_)),
      name_(std::move(name)),
      members_(std::move(members)) {}

void SharedBootstrap::set_look(const std::function<void()>& look) { job_->look = look; }

void SharedBootstrap::await(const std::atomic<std::uint64_t> BoardPart::* count, int rank) const {
  const auto start = std::chrono::steady_clock::now();
  for (int look = 0; (parts_[static_cast<std::size_t>(rank)]->*count).load() < exchanges_; ++look) {
    if (look < kLooksAwake) {
      sched_yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    job_->look();
    if (look % kLooksForTheDead == 0) expect_none_ended(count);
    if (std::chrono::steady_clock::now() - start > job_->timeout)
      throw CommError(concat("World::processes: for ", job_->timeout.count(),
                             " s (init_timeout_seconds) these ranks have not come: ",
                             detail::describe_ranks(late(count)),
                             "; all ranks make groups and symmetric memory in the same order"));
  }
}

// Who has ended may have come before.
void SharedBootstrap::expect_none_ended(const std::atomic<std::uint64_t> BoardPart::* count) const {
  std::string gone;
  for (std::size_t r = 0; r < members_.size(); ++r)
    if (const int rank = members_[r];
        job_->peers.has_ended(rank) && (parts_[r]->*count).load() < exchanges_)
      gone += concat("; rank ", rank, " is gone: its process ", job_->peers.pid(rank),
                     " has ended without a word, while ranks came together");
  if (!gone.empty()) throw LostRank(concat("World::processes: ", gone.substr(2)));
}

std::vector<int> SharedBootstrap::late(const std::atomic<std::uint64_t> BoardPart::* count) const {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < parts_.size(); ++r)
    if ((parts_[r]->*count).load() < exchanges_) ranks.push_back(members_[r]);
  std::ranges::sort(ranks);
  return ranks;
}

// Nobody posts the next piece before all have taken this one.
void SharedBootstrap::exchange_piece(std::span<const std::byte> own, std::byte* all,
                                     std::size_t stride) {
  BoardPart& mine = *parts_[static_cast<std::size_t>(rank())];
  std::ranges::copy(own, mine.data);
  ++exchanges_;
  mine.posted = exchanges_;
  for (int r = 0; r < size(); ++r) {
    await(&BoardPart::posted, r);
    const std::byte* const theirs = parts_[static_cast<std::size_t>(r)]->data;
    std::copy_n(theirs, own.size(), all + static_cast<std::size_t>(r) * stride);
  }
  mine.taken = exchanges_;
  for (int r = 0; r < size(); ++r) await(&BoardPart::taken, r);
}

void SharedBootstrap::exchange(std::span<const std::byte> own, std::byte* all) {
  std::size_t at = 0;
  do {
    const std::size_t bytes = std::min(own.size() - at, BoardPart::kBytes);
    exchange_piece(own.subspan(at, bytes), all + at, own.size());
    at += bytes;
  } while (at < own.size());
}

std::unique_ptr<Bootstrap> SharedBootstrap::split(int number, int order) {
  struct Seat {
    int number, order, rank;
  };
  std::vector<Seat> seats = exchange(Seat{number, order, rank()});
  std::erase_if(seats, [&](const Seat& seat) { return seat.number != number || number < 0; });
  std::ranges::sort(seats, {}, [](const Seat& seat) { return std::pair(seat.order, seat.rank); });
  std::vector<int> ranks, members;
  for (const Seat& seat : seats) {
    ranks.push_back(seat.rank);
    members.push_back(members_[static_cast<std::size_t>(seat.rank)]);
  }
  const auto own = static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
  const std::string name = concat(name_, '.', shares_++, '-', number);
  auto board = share_among(ranks, own, name, sizeof(BoardPart));
  if (number < 0) return nullptr;
  return std::unique_ptr<Bootstrap>(
      new SharedBootstrap(job_, std::move(board), name, std::move(members), own));
}

void SharedBootstrap::expect_no_error(const std::string& error) {
  std::array<char, 256> text{};
  error.copy(text.data(), text.size() - 1);
  const auto all = exchange(text);
  for (std::size_t r = 0; r < all.size(); ++r)
    if (all[r][0] != '\0') throw CommError(concat("rank ", members_[r], ": ", all[r].data()));
}

std::unique_ptr<SharedMemory> SharedBootstrap::share(std::int64_t bytes) {
  std::vector<int> ranks(static_cast<std::size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return share_among(ranks, rank(), concat(name_, '.', shares_++), bytes);
}

// Of `ranks` alone, but all ranks come here: they may have parts with others, or none.
std::unique_ptr<SharedMemory> SharedBootstrap::share_among(const std::vector<int>& ranks, int own,
                                                           const std::string& name,
                                                           std::int64_t bytes) {
  auto memory = std::make_unique<PosixMemory>(concat(job_->token, '-', name),
                                              static_cast<int>(ranks.size()), bytes);
  const bool is_member = !ranks.empty();
  try {
    expect_no_error(error_of([&] {
      if (is_member) memory->make(own);
    }));
    expect_no_error(error_of([&] {
      for (int r = 0; r < static_cast<int>(ranks.size()); ++r)
        if (!memory->map(r)) throw CommError("World::processes: a peer's shared memory is gone");
    }));
  } catch (...) {
    memory->free();  // nobody has used it
    throw;
  }
  memory->forget_names();
  return memory;
}

}  // namespace tessera::comm
