// Rank 0's side of a store: sockets around StoreState, on a thread of their own.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/store/store.hpp"

namespace tessera::detail {

class StoreServer {
 public:
  // Listens on the interface that has the address of the job's host, on the first free of its
  // ports.  Throws: JoinError where no address of it is this machine's, or no port is free.
  StoreServer(const StoreAddress& job, std::chrono::steady_clock::time_point deadline);
  // Ends the store at once.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const std::string& host() const noexcept;  // an address
  int port() const noexcept;
  // Where it listens, for people.
  std::string place() const;
  // Nobody may come any more. Waits until all ranks have left, and returns those that had not when
  // the time was over.
  std::vector<int> end(const std::string& why, std::chrono::milliseconds at_most);

 private:
  class Sockets;
  std::unique_ptr<Sockets> sockets_;
};

}  // namespace tessera::detail
