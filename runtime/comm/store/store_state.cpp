#include "runtime/comm/store/store_state.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera::detail {

StoreState::StoreState(const StoreAddress& job, const std::string& server, Out out)
    : job_(identity(job)), out_(std::move(out)), seats_(static_cast<std::size_t>(job.world_size)) {
  seats_[0].who = server;
}

void StoreState::opened(Session session) {
  const std::size_t strangers = sessions_.size() - taken_;
  sessions_.emplace(session, Visitor{});
  if (strangers >= kMostStrangers) return dismiss(session, MessageKind::later, "");
  out_.send(session, {.kind = MessageKind::greeting, .number = is_ending_ ? 0 : 1, .key = job_});
}

void StoreState::received(Session session, const Message& message) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;  // it is being closed
  Visitor& visitor = found->second;
  if (visitor.rank >= 0) {
    seats_[static_cast<std::size_t>(visitor.rank)].silent = Duration{0};
    return serve(session, visitor, message);
  }
  if (message.kind == MessageKind::hello) return seat(session, message);
  closed(session);
  out_.close(session);
}

void StoreState::seat(Session session, const Message& hello) {
  constexpr std::size_t kMostWho = 300;
  const std::string who = hello.value.substr(0, kMostWho);
  if (hello.key != job_) {
    other_ = concat("rank ", hello.number, " of another job came (", who,
                    "): ", describe_job(hello.key));
    return dismiss(session, MessageKind::refused,
                   concat("this store belongs to another job: ", describe_job(job_)));
  }
  if (hello.number < 0 || hello.number >= static_cast<std::int64_t>(seats_.size()))
    return dismiss(session, MessageKind::refused,
                   concat("rank ", hello.number, " is not from 0 to ", seats_.size() - 1));
  if (is_ending_) return dismiss(session, MessageKind::later, "");
  const auto rank = static_cast<int>(hello.number);
  Seat& seat = seats_[static_cast<std::size_t>(rank)];
  if (seat.session != 0 || (rank == 0 && who != seat.who))
    return dismiss(
        session, MessageKind::refused,
        concat("rank ", rank, " is claimed twice, by ", seat.who, " and by ", who,
               "; give each process a rank of its own, and each job its own port or run id"));
  seat = {.session = session, .who = who};
  sessions_.at(session).rank = rank;
  ++taken_;
  out_.send(session, {.kind = MessageKind::seated});
  if (taken_ < seats_.size()) return;
  is_full_ = true;
  tell_ranks({.kind = MessageKind::full});
}

void StoreState::serve(Session session, Visitor& visitor, const Message& message) {
  // Who may still be a stranger in a rank's seat can change nothing.
  const bool waits = message.kind == MessageKind::beat || message.kind == MessageKind::missing ||
                     message.kind == MessageKind::leave;
  if (!is_full_ && !waits) {
    closed(session);
    return out_.close(session);
  }
  switch (message.kind) {
    case MessageKind::set:
      return set(session, message, message.value);
    case MessageKind::add:
      return add(session, message);
    case MessageKind::get:
      return get(session, visitor, message);
    case MessageKind::forget:
      return forget(session, message.id);
    case MessageKind::missing:
      return out_.send(
          session, {.kind = MessageKind::answer, .id = message.id, .value = describe_missing()});
    case MessageKind::watch:
      silence_ = Duration(message.number);
      return;
    case MessageKind::last_words:
      return depart(visitor.rank, Departure::failed,
                    concat(name(visitor.rank), ": ", message.value));
    case MessageKind::beat:
      return out_.send(session, {.kind = MessageKind::pulse});
    case MessageKind::leave:
      if (is_full_) depart(visitor.rank, Departure::left, concat(name(visitor.rank), " has left"));
      [[fallthrough]];
    default:  // what only a store says: nobody who means well
      closed(session);
      return out_.close(session);
  }
}

// The answer has the message's number, which is the sum of `add`.
void StoreState::set(Session session, const Message& message, std::string value) {
  const auto found = values_.find(message.key);
  const std::size_t before =
      found == values_.end() ? 0 : kKeyCosts + message.key.size() + found->second.size();
  const std::size_t after = held_bytes_ - before + kKeyCosts + message.key.size() + value.size();
  if (after > kMostHeldBytes)
    return deny(
        session, message.id, false,
        concat("the store has no room: it holds ", held_bytes_, " bytes of ", kMostHeldBytes));
  held_bytes_ = after;
  out_.send(session, {.kind = MessageKind::answer, .id = message.id, .number = message.number});
  if (const auto waiting = waiting_.extract(message.key))
    for (const Waiting& w : waiting.mapped()) {
      --sessions_.at(w.session).waiting;
      out_.send(w.session, {.kind = MessageKind::answer, .id = w.id, .value = value});
    }
  values_.insert_or_assign(message.key, std::move(value));
}

void StoreState::add(Session session, const Message& message) {
  std::int64_t sum = 0;
  if (const auto found = values_.find(message.key); found != values_.end()) {
    const char *const begin = found->second.data(), *const end = begin + found->second.size();
    const auto [read, error] = std::from_chars(begin, end, sum);
    if (error != std::errc() || read != end)
      return deny(session, message.id, false, "its value is no number");
  }
  if (__builtin_add_overflow(sum, message.number, &sum))
    return deny(session, message.id, false, "the sum is larger than 63 bits hold");
  set(session, {.id = message.id, .number = sum, .key = message.key}, std::to_string(sum));
}

void StoreState::get(Session session, Visitor& visitor, const Message& message) {
  if (const auto found = values_.find(message.key); found != values_.end())
    return out_.send(session,
                     {.kind = MessageKind::answer, .id = message.id, .value = found->second});
  if (!failure_.empty()) return deny(session, message.id, true, failure_);
  if (visitor.waiting >= kMostWaiting)
    return deny(session, message.id, false, concat(kMostWaiting, " calls wait already"));
  ++visitor.waiting;
  waiting_[message.key].push_back({session, message.id});
}

void StoreState::forget(Session session, std::uint32_t id) {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    sessions_.at(session).waiting -= std::erase_if(
        at->second, [&](const Waiting& w) { return w.session == session && w.id == id; });
    at = at->second.empty() ? waiting_.erase(at) : std::next(at);
  }
}

void StoreState::closed(Session session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  const int rank = found->second.rank;
  for (auto at = waiting_.begin(); found->second.waiting > 0 && at != waiting_.end();) {
    std::erase_if(at->second, [&](const Waiting& w) { return w.session == session; });
    at = at->second.empty() ? waiting_.erase(at) : std::next(at);
  }
  sessions_.erase(found);
  if (rank < 0) return;
  --taken_;
  seats_[static_cast<std::size_t>(rank)].session = 0;
  if (is_full_)
    depart(rank, Departure::lost,
           concat(name(rank), " is gone: its connection has ended without a word"));
}

void StoreState::tick(Duration passed) {
  std::vector<Session> late;
  for (auto& [session, visitor] : sessions_)
    if (visitor.rank < 0 && (visitor.age += passed) > kStrangerMay) late.push_back(session);
  for (const Session session : late) dismiss(session, MessageKind::later, "");
  if (silence_ <= Duration{0}) return;
  for (std::size_t r = 0; r < seats_.size(); ++r) {
    Seat& seat = seats_[r];
    if (seat.session == 0 || seat.has_departed || (seat.silent += passed) < silence_) continue;
    const auto rank = static_cast<int>(r);
    depart(rank, Departure::lost,
           concat(name(rank), " shows no life for ", static_cast<double>(silence_.count()) * 1e-3,
                  " s: its process is stopped or starved, or its machine can't be reached"));
  }
}

void StoreState::end(const std::string& why) {
  is_ending_ = true;
  if (!is_full_) tell_ranks({.kind = MessageKind::refused, .number = 1, .value = why});
}

std::vector<int> StoreState::present() const {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < seats_.size(); ++r)
    if (seats_[r].session != 0 && !seats_[r].has_departed) ranks.push_back(static_cast<int>(r));
  return ranks;
}

std::string StoreState::describe_missing() const {
  std::vector<int> never, again;
  for (std::size_t r = 0; r < seats_.size(); ++r)
    if (seats_[r].session == 0)
      (seats_[r].who.empty() ? never : again).push_back(static_cast<int>(r));
  std::string text;
  if (!never.empty())
    text = concat(never.size() == 1 ? "rank " : "ranks ", describe_ranks(never), " of ",
                  seats_.size(), " never came; who came is on ", describe_hosts());
  if (!again.empty())
    text += concat(text.empty() ? "" : "; ", again.size() == 1 ? "rank " : "ranks ",
                   describe_ranks(again), " of ", seats_.size(), " came and went again, the first ",
                   seats_[static_cast<std::size_t>(again.front())].who);
  return text.empty() || other_.empty() ? text : concat(text, "; ", other_);
}

// "host gpu1, host gpu2", of at most a dozen, in the order of ranks: of the rest one is amiss.
std::string StoreState::describe_hosts() const {
  constexpr std::size_t kMostHosts = 12;
  std::vector<std::string> hosts;
  for (const Seat& seat : seats_) {
    const std::string host = seat.who.substr(0, seat.who.find(','));
    if (seat.session != 0 && std::ranges::find(hosts, host) == hosts.end()) hosts.push_back(host);
  }
  std::string text;
  for (std::size_t i = 0; i < hosts.size() && i < kMostHosts; ++i)
    text += concat(i == 0 ? "" : ", ", hosts[i]);
  if (hosts.size() > kMostHosts) text += concat(" and ", hosts.size() - kMostHosts, " more");
  return hosts.empty() ? "no host" : text;
}

void StoreState::deny(Session session, std::uint32_t id, bool is_lost, const std::string& why) {
  out_.send(session,
            {.kind = MessageKind::denied, .id = id, .number = is_lost ? 1 : 0, .value = why});
}

void StoreState::dismiss(Session session, MessageKind kind, const std::string& why) {
  out_.send(session, {.kind = kind, .value = why});
  closed(session);
  out_.close(session);
}

// A store of which one is gone takes nobody any more: who comes means the next attempt.
void StoreState::depart(int rank, Departure how, const std::string& why) {
  is_ending_ = true;
  Seat& seat = seats_[static_cast<std::size_t>(rank)];
  if (seat.has_departed) return;
  seat.has_departed = true;
  tell_ranks({.kind = MessageKind::departed,
              .id = static_cast<std::uint32_t>(how),
              .number = rank,
              .value = why});
  if (how == Departure::left) return;
  if (failure_.empty()) failure_ = why;
  for (const auto& [key, all] : std::exchange(waiting_, {}))
    for (const Waiting& w : all) {
      --sessions_.at(w.session).waiting;
      deny(w.session, w.id, true, why);
    }
}

void StoreState::tell_ranks(const Message& message) {
  for (const Seat& seat : seats_)
    if (seat.session != 0) out_.send(seat.session, message);
}

std::string StoreState::name(int rank) const {
  return concat("rank ", rank, " (", seats_[static_cast<std::size_t>(rank)].who, ")");
}

}  // namespace tessera::detail
