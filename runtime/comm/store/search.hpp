// A rank looks for the store of its job: on all ports and addresses that it may be at, again and
// again until the time is over. Includes Asio: for the sources of this folder alone.
//
//   wave   look up ─┬─ port ──── connect ─ greeting? ─┐ first store of this job
//                   ├─ port+1 ── refused              ├──────────────────────── hello ─ seated
//                   └─ port+16 ─ connect ─ silence    ┘
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/store/message.hpp"
#include "runtime/comm/store/store.hpp"

namespace tessera::detail {

class StoreSearch {
 public:
  using Clock = std::chrono::steady_clock;

  // `context` is run by `next`, and the sockets are of it. `known`: where the store is.
  StoreSearch(asio::io_context& context, const StoreAddress& job, int rank,
              Clock::time_point deadline, std::optional<asio::ip::tcp::endpoint> known = {});

  // The connection, with a seat, to the next store that has one for this rank.
  // Throws: JoinError when the time is over, with what was found instead; and when the seat is
  // taken.
  asio::ip::tcp::socket next();

  // For rank 0, which serves at `own`.  Throws: JoinError, which names both processes, where
  // another one serves the same job.
  static void refuse_another(const StoreAddress& job, const asio::ip::tcp::endpoint& own,
                             Clock::time_point deadline);

 private:
  class Probe;

  std::vector<asio::ip::tcp::endpoint> places();
  // The store that has been found, if any; notes what else was.
  std::shared_ptr<Probe> wave(const std::vector<asio::ip::tcp::endpoint>& places,
                              Clock::time_point latest);
  bool is_open_store(const Probe& probe) const;
  Message hello() const;
  // Whether it gave the seat.
  bool claim(Probe& probe);
  void note(const std::vector<std::shared_ptr<Probe>>& probes);
  void run_until(Clock::time_point latest, const std::function<bool()>& done);

  asio::io_context& context_;
  const StoreAddress& job_;
  const int rank_;
  const Clock::time_point deadline_;
  const std::optional<asio::ip::tcp::endpoint> known_;
  std::string notes_;  // what the last wave found
};

}  // namespace tessera::detail
