#include "runtime/run/process_seat.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <string>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"

namespace tessera {
namespace {

// Of ports that no system hands out by itself, and room for the store's next ones.
constexpr int kFirstPort = 20000, kPorts = 12000;

// Who made the socket through which a rank talks to its launcher: Hydra makes one for each rank of
// a machine. Without one, who started this process.
int pmi_server(const char* descriptor) {
  const std::string_view text = descriptor ? descriptor : "";
  int fd = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  ucred peer{};
  socklen_t length = sizeof peer;
  if (error == std::errc() && end == text.data() + text.size() &&
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid > 0)
    return peer.pid;
  return getppid();
}

std::string run_id(const LaunchEnvironment& environment, const EnvironmentLookup& lookup) {
  if (environment.launcher == Launcher::pmi) return concat("PMI ", pmi_server(lookup("PMI_FD")));
  const char* const job = lookup("PMIX_NAMESPACE");
  return job ? job : "none";
}

}  // namespace

ProcessSeat process_seat(const LaunchEnvironment& environment, const EnvironmentLookup& lookup) {
  if (environment.store_port != 0)
    return {.rank = environment.rank,
            .size = environment.world_size,
            .host = environment.store_host,
            .port = environment.store_port,
            .run_id = environment.run_id,
            .local_rank = environment.local_rank,
            .host_from = environment.store_host_from,
            .port_from = environment.store_port_from,
            .local_rank_from = environment.local_rank_from};
  if (environment.local_size > 0 && environment.local_size < environment.world_size)
    throw DataError(concat(name(environment.launcher), " has started ", environment.local_size,
                           " of ", environment.world_size,
                           " ranks on this machine; between machines CPU ranks exchange through "
                           "MPI: start the job as mpirun -n ",
                           environment.world_size,
                           " PROGRAM with a build that has MPI, or run all ranks on one machine"));
  ProcessSeat seat{.rank = environment.rank, .size = environment.world_size};
  seat.local_rank = environment.local_rank;
  seat.run_id = run_id(environment, lookup);
  seat.port = kFirstPort + static_cast<int>(fnv1a(seat.run_id) % kPorts);
  seat.host_from = "this machine";
  seat.port_from = concat("port ", seat.port, " by the job's name '", seat.run_id, "'");
  seat.local_rank_from = environment.local_rank_from;
  return seat;
}

}  // namespace tessera
