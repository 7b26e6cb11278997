#include "runtime/comm/store/lookup.hpp"

#include <fcntl.h>

#include <algorithm>
#include <asio/io_context.hpp>
#include <future>
#include <memory>
#include <thread>

#include "runtime/base/held_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/join_error.hpp"

namespace tessera::detail {
namespace {

HostAddresses ask_system(const std::string& host) {
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

}  // namespace

HostAddresses look_up(const std::string& host, std::chrono::steady_clock::time_point deadline) {
  asio::error_code error;
  if (const auto address = asio::ip::make_address(host, error); !error) {
    if (address.is_v6() && address.to_v6().is_link_local() && address.to_v6().scope_id() == 0)
      throw JoinError(concat("the store: ", host,
                             " is an address on a link; name the interface to it, as in ", host,
                             "%eth0"));
    return {{address}, ""};
  }
  const auto promise = std::make_shared<std::promise<HostAddresses>>();
  std::future<HostAddresses> answer = promise->get_future();
  {
    const HeldSignals others_take_them;
    std::thread([promise, host] { promise->set_value(ask_system(host)); }).detach();
  }
  if (answer.wait_until(deadline) == std::future_status::ready) return answer.get();
  return {{}, "the system's lookup takes longer than the time that is left"};
}

void keep_from_children(int socket) { ::fcntl(socket, F_SETFD, FD_CLOEXEC); }

std::string describe(const asio::ip::tcp::endpoint& endpoint) {
  return concat(endpoint.address().to_string(), " port ", endpoint.port());
}

}  // namespace tessera::detail
