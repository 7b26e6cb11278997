// A rank's side of a store: one connection, on a thread of its own that reads, beats and hears who
// has gone. Includes Asio: for the sources of this folder alone.
#pragma once

#include <array>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/thread.hpp"
#include "runtime/comm/store/message.hpp"
#include "runtime/comm/store/server.hpp"
#include "runtime/comm/store/store.hpp"

namespace tessera::detail {

class StoreClient final : public Store {
 public:
  using Clock = std::chrono::steady_clock;

  // With a seat. The socket is of `context`.
  StoreClient(int rank, asio::ip::tcp::socket socket, std::unique_ptr<asio::io_context> context);
  ~StoreClient() override;

  // Returns true once all ranks are here, false when the store has ended before. `deadline` holds
  // for all calls up to `watch`.  Throws: JoinError when the store gives up, or when the time is
  // over.
  bool wait_until_full(Clock::time_point deadline);
  // Rank 0's store ends behind its own connection.
  void own(std::unique_ptr<StoreServer> server) { server_ = std::move(server); }

  void set(std::string_view key, std::string_view value) override;
  std::string get(std::string_view key, std::chrono::milliseconds timeout) override;
  std::int64_t add(std::string_view key, std::int64_t n) override;
  void watch(std::chrono::milliseconds silence, Hear hear) override;
  void last_words(std::string_view why) override;

 private:
  // The thread's.
  void run() noexcept;
  void read();
  bool take_messages();
  void take(Message& message);
  void depart(int rank, Departure how, const std::string& why);
  void beat();
  void write();
  void lose(const std::string& why);

  // Anybody's.
  void send(Message message);
  std::optional<Message> ask(Message message, Clock::time_point deadline);
  Clock::time_point latest(std::chrono::milliseconds timeout) const;
  void expect_not_refused() const;  // with the mutex
  Message ask_for(std::string_view call, Message message, Clock::time_point deadline);

  const int rank_;
  Clock::time_point deadline_ = Clock::time_point::max();
  std::atomic<bool> watches_{false};
  std::unique_ptr<StoreServer> server_;  // rank 0's
  std::unique_ptr<asio::io_context> context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;  // also behind the last message

  // Of the thread alone.
  asio::ip::tcp::socket socket_;
  asio::steady_timer beat_;
  std::array<char, 8192> chunk_{};
  std::string in_, out_, sending_;
  Hear hear_;
  std::vector<Message> unheard_;
  std::chrono::milliseconds silence_{0}, silent_{0};
  Clock::time_point last_beat_ = Clock::now();
  std::string server_departed_;  // why

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<std::uint32_t, std::optional<Message>> answers_;  // to questions
  std::uint32_t last_id_ = 0;
  bool is_full_ = false;
  std::optional<Message> refused_;
  std::string ended_;  // why nothing comes any more
  bool is_leaving_ = false;
  Thread thread_;  // last: it uses the rest
};

}  // namespace tessera::detail
