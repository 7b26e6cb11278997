#include "runtime/comm/store/client.hpp"

#include <algorithm>
#include <asio/post.hpp>
#include <asio/write.hpp>
#include <utility>

#include "runtime/base/held_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/comm/lost_rank.hpp"
#include "tessera/detail/base/text.hpp"

namespace tessera::detail {
namespace {

using namespace std::chrono_literals;
using asio::ip::tcp;

constexpr std::chrono::milliseconds kBeat = 250ms;
// A store answers at once, unless its process is stopped.
constexpr std::chrono::seconds kAnswers = 60s;
// What is waited behind a deadline: for rank 0, which says the same for all, and for who leaves.
constexpr std::chrono::milliseconds kGrace = 250ms, kAtEnd = 500ms;
constexpr std::size_t kMostLastWords = std::size_t{64} << 10;

}  // namespace

StoreClient::StoreClient(int rank, tcp::socket socket, std::unique_ptr<asio::io_context> context)
    : rank_(rank),
      context_(std::move(context)),
      work_(asio::make_work_guard(*context_)),
      socket_(std::move(socket)),
      beat_(*context_) {
  asio::error_code unset;
  socket_.set_option(tcp::no_delay(true), unset);
  context_->restart();
  read();
  beat();
  const HeldSignals others_take_them;
  thread_ = Thread([this] { run(); });
}

StoreClient::~StoreClient() {
  {
    std::unique_lock lock(mutex_);
    is_leaving_ = true;
    if (ended_.empty()) {
      lock.unlock();
      send({.kind = MessageKind::leave});
      lock.lock();
      const auto at_most = watches_ || Clock::now() < deadline_ ? 2000ms : kGrace;
      changed_.wait_for(lock, at_most, [this] { return !ended_.empty(); });
    }
  }
  context_->stop();
  thread_.join();
  if (!server_) return;
  const auto begin = Clock::now();
  const auto at_most =
      watches_ ? begin + kParting : std::min(begin + kParting, std::max(deadline_, begin + kAtEnd));
  const std::vector<int> staying = server_->end(
      "rank 0 has left", std::chrono::ceil<std::chrono::milliseconds>(at_most - begin));
  if (!staying.empty())
    log(LogLevel::warning, concat("the store: rank 0 ends its store, although ",
                                  staying.size() == 1 ? "rank " : "ranks ", describe_ranks(staying),
                                  staying.size() == 1 ? " has" : " have", " not left"));
}

bool StoreClient::wait_until_full(Clock::time_point deadline) {
  deadline_ = deadline;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return is_full_ || refused_ || !ended_.empty(); });
    expect_not_refused();
    if (is_full_) return true;
    if (!ended_.empty()) return false;
  }
  const std::optional<Message> missing = ask({.kind = MessageKind::missing}, deadline + kAtEnd);
  std::unique_lock lock(mutex_);
  // Mostly rank 0's time is over as well.
  if (rank_ != 0 && missing)
    changed_.wait_until(lock, deadline + kGrace, [this] { return is_full_ || refused_; });
  expect_not_refused();
  if (is_full_) return true;
  throw JoinError(concat(
      "the store: rank ", rank_, " has waited for its whole timeout: ",
      missing ? missing->value : "rank 0 does not say who never came, it is stopped or starved",
      "; start all ranks within init_timeout_seconds, or raise it"));
}

void StoreClient::expect_not_refused() const {
  if (!refused_) return;
  throw with_rank(JoinError(refused_->value), refused_->number == 1 ? 0 : rank_);
}

// Up to `watch` nobody may be waited for beyond the time to come together.
StoreClient::Clock::time_point StoreClient::latest(std::chrono::milliseconds timeout) const {
  const auto own = Clock::now() + timeout;
  return watches_ ? own : std::min(own, std::max(deadline_, Clock::now() + kGrace));
}

void StoreClient::set(std::string_view key, std::string_view value) {
  ask_for("set", {.kind = MessageKind::set, .key = std::string(key), .value = std::string(value)},
          latest(kAnswers));
}

std::string StoreClient::get(std::string_view key, std::chrono::milliseconds timeout) {
  return ask_for("get", {.kind = MessageKind::get, .key = std::string(key)}, latest(timeout)).value;
}

std::int64_t StoreClient::add(std::string_view key, std::int64_t n) {
  return ask_for("add", {.kind = MessageKind::add, .number = n, .key = std::string(key)},
                 latest(kAnswers))
      .number;
}

void StoreClient::watch(std::chrono::milliseconds silence, Hear hear) {
  watches_ = true;
  asio::post(*context_, [this, silence, hear = std::move(hear)]() mutable {
    hear_ = std::move(hear);
    silence_ = silence;
    for (const Message& m : std::exchange(unheard_, {}))
      hear_(static_cast<int>(m.number), static_cast<Departure>(m.id), m.value);
    beat_.expires_after(0ms);  // at once, and from here on as often as it needs
  });
  send({.kind = MessageKind::watch, .number = silence.count()});
}

void StoreClient::last_words(std::string_view why) {
  send({.kind = MessageKind::last_words, .value = std::string(why.substr(0, kMostLastWords))});
}

void StoreClient::run() noexcept {
  try {
    context_->run();
  } catch (...) {
    lose(describe_exception());
  }
}

void StoreClient::read() {
  socket_.async_read_some(asio::buffer(chunk_), [this](asio::error_code error, std::size_t n) {
    if (error) return lose(error.message());
    silent_ = 0ms;
    in_.append(chunk_.data(), n);
    if (!take_messages()) return lose("it sent something that is no message");
    read();
  });
}

bool StoreClient::take_messages() {
  std::size_t at = 0;
  while (in_.size() - at >= kLengthBytes) {
    const std::string_view rest = std::string_view(in_).substr(at);
    const auto length = length_of(rest, kMostMessageBytes);
    if (!length) return false;
    if (rest.size() - kLengthBytes < *length) break;
    auto message = decode(rest.substr(kLengthBytes, *length));
    if (!message) return false;
    at += kLengthBytes + *length;
    take(*message);
  }
  in_.erase(0, at);
  return true;
}

void StoreClient::take(Message& message) {
  if (message.kind == MessageKind::departed)
    return depart(static_cast<int>(message.number), static_cast<Departure>(message.id),
                  message.value);
  const std::lock_guard lock(mutex_);
  if (message.kind == MessageKind::full) is_full_ = true;
  if (message.kind == MessageKind::refused) refused_ = message;
  if (message.kind == MessageKind::answer || message.kind == MessageKind::denied)
    if (const auto asked = answers_.find(message.id); asked != answers_.end())
      asked->second = std::move(message);
  changed_.notify_all();
}

void StoreClient::depart(int rank, Departure how, const std::string& why) {
  if (rank == rank_ && how == Departure::left) return;  // it knows
  if (rank == 0) server_departed_ = why;
  if (hear_) return hear_(rank, how, why);
  unheard_.push_back({.kind = MessageKind::departed,
                      .id = static_cast<std::uint32_t>(how),
                      .number = rank,
                      .value = why});
}

// Often enough for a silence to mean something. Only time in which this process ran counts: after a
// stop of it nobody else is to blame.
void StoreClient::beat() {
  const auto now = Clock::now();
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_beat_);
  last_beat_ = now;
  const auto every = silence_ > 0ms ? std::clamp(silence_ / 4, 10ms, kBeat) : kBeat;
  silent_ += std::min(passed, 2 * every);
  if (silence_ > 0ms && silent_ >= silence_ && server_departed_.empty()) {
    depart(0, Departure::lost,
           concat("rank 0, which serves the store, shows no life for ",
                  static_cast<double>(silence_.count()) * 1e-3,
                  " s: its process is stopped or starved, or its machine can't be reached"));
    return lose(server_departed_);  // nobody waits for its answers any more
  }
  out_ += encode({.kind = MessageKind::beat});
  write();
  beat_.expires_after(every);
  beat_.async_wait([this](asio::error_code) {
    if (socket_.is_open()) beat();
  });
}

void StoreClient::write() {
  if (!sending_.empty() || out_.empty()) return;
  sending_ = std::exchange(out_, {});
  asio::async_write(socket_, asio::buffer(sending_), [this](asio::error_code error, std::size_t) {
    sending_.clear();
    if (error) return lose(error.message());
    write();
  });
}

// Also the end of an orderly leave.
void StoreClient::lose(const std::string& why) {
  asio::error_code ignored;
  socket_.close(ignored);
  bool is_news = false;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.empty()) return;
    is_news = is_full_ && !is_leaving_ && server_departed_.empty();
    ended_ = server_departed_.empty() ? concat("rank 0, which serves the store, is gone: ", why)
                                      : server_departed_;
    changed_.notify_all();
  }
  beat_.cancel();
  if (is_news) depart(0, Departure::lost, ended_);
}

void StoreClient::send(Message message) {
  asio::post(*context_, [this, bytes = encode(message)] {
    out_ += bytes;
    write();
  });
}

std::optional<Message> StoreClient::ask(Message message, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const std::uint32_t id = message.id = ++last_id_;
  const bool may_wait = message.kind == MessageKind::get;
  const auto asked = answers_.emplace(id, std::nullopt).first;
  send(std::move(message));
  const auto is_over = [&] { return asked->second || !ended_.empty(); };
  changed_.wait_until(lock, deadline, is_over);
  std::optional<Message> answer = std::move(asked->second);
  answers_.erase(asked);
  if (!answer && !ended_.empty()) throw LostRank(ended_);
  if (!answer && may_wait) send({.kind = MessageKind::forget, .id = id});
  return answer;
}

Message StoreClient::ask_for(std::string_view call, Message message, Clock::time_point deadline) {
  const std::string key = message.key;
  const bool may_wait = message.kind == MessageKind::get;
  if (key.size() > kMostKeyBytes || message.value.size() > kMostValueBytes)
    throw DataError(concat("the store: ", call, ": the key has ", key.size(), " bytes, the value ",
                           message.value.size(), "; expected at most ", kMostKeyBytes, " and ",
                           kMostValueBytes));
  const std::optional<Message> answer = ask(std::move(message), deadline);
  if (!answer) {
    const std::string why =
        concat("the store: ", call, ": rank ", rank_, " has waited in vain for '", key,
               may_wait ? "', which nobody has set" : "'; the process of rank 0 gives no answer");
    if (watches_) throw CommError(why);
    throw JoinError(why);
  }
  if (answer->kind == MessageKind::answer) return *answer;
  const std::string why = concat("the store: ", call, " of '", key, "': ", answer->value);
  if (answer->number == 1) throw LostRank(why);
  throw DataError(why);
}

}  // namespace tessera::detail
