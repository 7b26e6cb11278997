#include "runtime/comm/store/lookup.hpp"

#include <fcntl.h>

#include <algorithm>
#include <asio/io_context.hpp>

#include "tessera/base/error.hpp"

namespace tessera::detail {

HostAddresses look_up(const std::string& host) {
  asio::io_context context;
  asio::error_code error;
  asio::ip::tcp::resolver resolver(context);
  HostAddresses all;
  for (const auto& entry : resolver.resolve(host, "", error))
    if (const asio::ip::address address = entry.endpoint().address();
        std::ranges::find(all.found, address) == all.found.end())
      all.found.push_back(address);
  if (all.found.empty()) all.failure = error ? error.message() : "it has no address";
  return all;
}

void keep_from_children(int socket) { ::fcntl(socket, F_SETFD, FD_CLOEXEC); }

std::string describe(const asio::ip::tcp::endpoint& endpoint) {
  return concat(endpoint.address().to_string(), " port ", endpoint.port());
}

}  // namespace tessera::detail
