// Where the processes of a job meet, under each launcher.
#include "runtime/run/process_seat.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <string>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

ProcessSeat seat_in(const std::map<std::string, std::string>& variables) {
  const EnvironmentLookup lookup = [&](const char* variable) -> const char* {
    const auto found = variables.find(variable);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  return process_seat(detect(lookup), lookup);
}

bool meet(const ProcessSeat& a, const ProcessSeat& b) {
  return a.host == b.host && a.port == b.port && a.run_id == b.run_id && a.size == b.size;
}

}  // namespace

TEST_CASE("ranks meet where their launcher says") {
  const ProcessSeat seat = seat_in({{"RANK", "1"},
                                    {"WORLD_SIZE", "8"},
                                    {"LOCAL_RANK", "1"},
                                    {"MASTER_ADDR", "node1"},
                                    {"MASTER_PORT", "29511"},
                                    {"TORCHELASTIC_RUN_ID", "job 7"}});
  CHECK(seat.rank == 1);
  CHECK(seat.size == 8);
  CHECK(seat.host == "node1");
  CHECK(seat.port == 29511);
  CHECK(seat.run_id == "job 7");
  CHECK(seat.host_from == "MASTER_ADDR=node1");
  CHECK(seat.port_from == "MASTER_PORT=29511");
  CHECK(seat.local_rank_from == "LOCAL_RANK=1");
}

TEST_CASE("ranks of one mpiexec meet at the process that serves them, and no others do") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const auto under = [](int rank, int fd) {
    return seat_in(
        {{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(fd)}});
  };
  const ProcessSeat seat = under(0, ends[0]);
  CHECK(seat.run_id == concat("PMI ", getpid()));
  CHECK(seat.port_from == concat("port ", seat.port, " by the job's name 'PMI ", getpid(), "'"));
  CHECK(seat.host == "127.0.0.1");
  CHECK(seat.port >= 20000);
  CHECK(seat.port + 16 < 32768);
  CHECK(meet(seat, under(1, ends[1])));
  close(ends[0]);
  close(ends[1]);
  CHECK(under(0, ends[0]).run_id == concat("PMI ", getppid()));
  CHECK(!meet(seat, under(0, ends[0])));
}

TEST_CASE("ranks that are on several machines and have no address hear of mpirun") {
  CHECK_THROWS_WITH(seat_in({{"PMI_RANK", "2"},
                             {"PMI_SIZE", "4"},
                             {"MPI_LOCALRANKID", "0"},
                             {"MPI_LOCALNRANKS", "2"}}),
                    Contains("2 of 4 ranks") && Contains("mpirun -n 4"));
}
