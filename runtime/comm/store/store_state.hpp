// What a store knows: who sits where, keys and values, who waits for which, who has gone. It sees
// messages and sessions, no sockets, so that a test can play any ranks and strangers, in any order.
//
//   a seat   empty ── hello ── taken ── leave, or the end of its connection ── gone
//                └─ before all are here: empty again ─┘
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/comm/store/message.hpp"
#include "runtime/comm/store/store.hpp"

namespace tessera::detail {

// Threads: one.
class StoreState {
 public:
  using Session = std::uint64_t;  // a connection
  using Duration = std::chrono::milliseconds;

  struct Out {
    std::function<void(Session, const Message&)> send;
    std::function<void(Session)> close;  // once all that was sent is out; `closed` need not follow
  };

  // The seat of rank 0 is kept for `server`, the process that this is.
  StoreState(const StoreAddress& job, const std::string& server, Out out);

  void opened(Session session);
  void received(Session session, const Message& message);
  void closed(Session session);
  // So much time has gone by.
  void tick(Duration passed);
  // Nobody may come any more; who waits for others to come hears why.
  void end(const std::string& why);

  bool has_seat(Session session) const { return sessions_.at(session).rank >= 0; }
  bool is_full() const { return is_full_; }
  // Ranks that have a seat and have neither left nor been lost.
  std::vector<int> present() const;
  // "ranks 3-5 of 8 never came", on which hosts the others are, who went again, and who came of
  // another job; empty when all are here.
  std::string describe_missing() const;

  // Of strangers, so that no number of them shuts a rank out for long.
  static constexpr std::size_t kMostStrangers = 4096;
  static constexpr Duration kStrangerMay{10'000};
  static constexpr std::size_t kMostHeldBytes = std::size_t{64} << 20, kKeyCosts = 128,
                               kMostWaiting = 4096;

 private:
  struct Visitor {
    int rank = -1;  // without a seat
    Duration age{0};
    std::size_t waiting = 0;
  };
  struct Seat {
    Session session = 0;  // 0: empty, or gone
    std::string who;      // of the last that had it
    Duration silent{0};
    bool has_departed = false;  // and all have been told
  };
  struct Waiting {
    Session session;
    std::uint32_t id;
  };

  void seat(Session session, const Message& hello);
  void serve(Session session, Visitor& visitor, const Message& message);
  void set(Session session, const Message& message, std::string value);
  void add(Session session, const Message& message);
  void get(Session session, Visitor& visitor, const Message& message);
  void forget(Session session, std::uint32_t id);
  std::string describe_hosts() const;
  void deny(Session session, std::uint32_t id, bool is_lost, const std::string& why);
  void dismiss(Session session, MessageKind kind, const std::string& why);
  void depart(int rank, Departure how, const std::string& why);
  void tell_ranks(const Message& message);
  std::string name(int rank) const;

  const std::string job_;
  const Out out_;
  std::map<Session, Visitor> sessions_;
  std::vector<Seat> seats_;
  std::size_t taken_ = 0;
  bool is_full_ = false;
  bool is_ending_ = false;
  std::string other_;    // who of another job came last
  std::string failure_;  // why the first rank that did not leave in order has gone
  Duration silence_{0};
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, std::vector<Waiting>, std::less<>> waiting_;
  std::size_t held_bytes_ = 0;
};

}  // namespace tessera::detail
