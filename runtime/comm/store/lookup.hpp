// The addresses of a host, for the two sides of a store. Includes Asio: for their sources alone.
#pragma once

#include <asio/ip/tcp.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "runtime/comm/store/store.hpp"

namespace tessera::detail {

// Those that the system finds for the host; where it finds none, why.
struct HostAddresses {
  std::vector<asio::ip::address> found;
  std::string failure;
};
// A lookup that hangs does so for as long as the system's resolver is set to, mostly 5 to 10 s, and
// can't be ended: it goes on behind `deadline`, on a thread of its own.
// Throws: JoinError for an address on a link without its interface.
HostAddresses look_up(const std::string& host, std::chrono::steady_clock::time_point deadline);

// Programs that this process starts do not get the socket: a peer sees by its end that a rank died.
void keep_from_children(int socket);

// "10.0.0.1 port 29500", "[::1] port 29500".
std::string describe(const asio::ip::tcp::endpoint& endpoint);

}  // namespace tessera::detail
