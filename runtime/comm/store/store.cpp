#include "runtime/comm/store/store.hpp"

#include <utility>

#include "runtime/comm/store/client.hpp"
#include "runtime/comm/store/search.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/join_error.hpp"

namespace tessera::detail {
namespace {

using namespace std::chrono_literals;
using asio::ip::tcp;

void check(const StoreAddress& job, int rank) {
  constexpr std::size_t kMostText = 400;
  if (job.host.empty() || job.host.size() > kMostText || job.run_id.size() > kMostText)
    throw DataError(concat("the store: the host '", job.host, "' and the run id '", job.run_id,
                           "' must have at most ", kMostText, " bytes, and the host at least one"));
  if (job.port < 1 || job.port > 65535)
    throw DataError(concat("the store: port ", job.port, " is not between 1 and 65535"));
  if (rank < 0 || rank >= job.world_size)
    throw DataError(concat("the store: rank ", rank, " is not from 0 to ", job.world_size - 1));
}

}  // namespace

std::unique_ptr<Store> Store::join(const StoreAddress& job, int rank,
                                   std::chrono::milliseconds timeout) {
  check(job, rank);
  const auto deadline = StoreClient::Clock::now() + timeout;
  std::unique_ptr<StoreServer> server;
  std::optional<tcp::endpoint> own;
  if (rank == 0) {
    server = std::make_unique<StoreServer>(job, deadline);
    own.emplace(asio::ip::make_address(server->host()),
                static_cast<asio::ip::port_type>(server->port()));
    StoreSearch::refuse_another(job, *own, deadline);
  }
  for (;;) {
    auto context = std::make_unique<asio::io_context>(1);
    auto client = std::make_unique<StoreClient>(
        rank, StoreSearch(*context, job, rank, deadline, own).next(), std::move(context));
    try {
      if (client->wait_until_full(deadline)) {
        client->own(std::move(server));
        return client;
      }
    } catch (const JoinError& error) {
      if (!server) throw;
      const std::string why = concat(error.what(), "; rank 0 listens on ", server->place());
      client.reset();
      server->end(why, 500ms);
      throw with_rank(JoinError(why), 0);
    }
  }
}

}  // namespace tessera::detail
