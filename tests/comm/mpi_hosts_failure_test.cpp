// Who hears what when ranks on several hosts disagree or fail. Run under mpirun; every rank runs
// all cases in the same order.
#include <unistd.h>

#include <csignal>
#include <random>
#include <stdexcept>

#include "tests/comm/mismatch.hpp"
#include "tests/comm/mpi_hosts.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using K = CollectiveKind;

TEST_CASE("mpi hosts: a rank that goes astray is named on every rank, before a byte moves",
          "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  const std::vector<Hosts> all = placements();
  for (mismatch::Kind kind : mismatch::kinds()) {
    const Hosts& hosts = all[draw() % all.size()];
    const int odd = static_cast<int>(draw() % hosts.size());
    INFO(to_string(hosts));
    // In which earlier call ranks parted is seen within a host only, and so are ranks that wait on
    // different communicators: those of different hosts hear of it by the timeout.
    const std::string_view name = kind.name;
    if (name == "order across groups" || name == "extra" || name == "missing") kind.says = {};
    if (name == "group" && std::ranges::count(hosts, hosts[static_cast<std::size_t>(odd)]) == 1)
      continue;
    const PretendedHosts pretended(hosts);
    mismatch::Heard heard;
    thrown(
        [&](World& world) {
          heard = mismatch::provoke(world, kind, odd);
          throw std::runtime_error(heard.message);
        },
        {.timeout_seconds = 10});
    CHECK(mismatch::verdict(heard, kind, keeper().rank(), odd) == "");
  }
}

TEST_CASE("mpi hosts: sends that ranks of a host can't read, or not alike, are refused",
          "[comm][mpi]") {
  std::mt19937_64 draw(agreed_seed());
  const Hosts hosts = draw_hosts(draw);
  INFO(to_string(hosts));
  const PretendedHosts pretended(hosts);
  const std::string message = thrown([&](World& world) {
    const auto arena = world.allocate_symmetric(8192);
    std::vector<float> outside(64);
    Collective c{.send = outside.data(), .recv = arena->data(), .count = 2};
    c.kind = K::reduce_scatter;
    if (!is_flat(hosts))
      CHECK_THROWS_WITH(world.reduce().submit(c, "unit", {}), Contains("allocate_symmetric"));
    c.send = arena->data() + 4096 + 64 * world.rank();
    world.reduce().submit(c, "unit", {});
    world.device().synchronize();
  });
  if (is_flat(hosts))  // nobody reads another's memory
    CHECK(message.empty());
  else
    CHECK_THAT(message, Contains("CommError") && Contains("different offsets"));
}

TEST_CASE("mpi hosts: a rank that throws is named on every host, long before a timeout",
          "[comm][mpi]") {
  std::mt19937_64 draw(agreed_seed());
  for (int thrower = 0; thrower < keeper().size(); ++thrower)
    for (const bool allocates : {false, true}) {
      const Hosts hosts = draw_hosts(draw);
      INFO(to_string(hosts));
      const PretendedHosts pretended(hosts);
      const std::string message = thrown([&](World& world) {
        world.sum(1.0);
        if (world.rank() == thrower) throw std::runtime_error("the disk is full");
        if (allocates)
          world.allocate_symmetric(4096);
        else
          world.sum(2.0);
      });
      if (keeper().rank() == thrower)
        CHECK(message == "the disk is full");
      else  // or another rank that failed for the same reason
        CHECK_THAT(message, Contains("CommError") && Contains("failed"));
    }
}

TEST_CASE("mpi hosts: ranks that are through do not wait for one that fails at the end",
          "[comm][mpi]") {
  std::mt19937_64 draw(agreed_seed());
  const Hosts hosts = draw_hosts(draw);
  INFO(to_string(hosts));
  const PretendedHosts pretended(hosts);
  const std::string message = thrown([&](World& world) {
    world.barrier();
    if (world.rank() == 0) throw std::runtime_error("the disk is full");
  });
  CHECK_THAT(message, keeper().rank() == 0 ? Contains("the disk is full") : Contains(""));
}

// A stopped process is what its peers see of one that is dead and not yet buried. On a host of its
// own nobody sees it.
TEST_CASE("mpi hosts: a rank that shows no life is named on every host", "[comm][mpi]") {
  std::mt19937_64 draw(agreed_seed());
  const Hosts hosts = draw_hosts(draw);
  const int dead = static_cast<int>(draw() % hosts.size());
  const bool is_seen = std::ranges::count(hosts, hosts[static_cast<std::size_t>(dead)]) > 1;
  INFO(to_string(hosts) << ", rank " << dead);
  const PretendedHosts pretended(hosts);
  const std::string message = thrown(
      [&](World& world) {
        world.sum(1.0);
        if (world.rank() == dead) {
          const pid_t own = getpid();
          if (fork() == 0) {
            sleep(4);
            kill(own, SIGCONT);
            raise(SIGKILL);  // a copy of the test must not go on
          }
          raise(SIGSTOP);
        }
        world.sum(2.0);
      },
      {.timeout_seconds = is_seen ? 100. : 2., .heartbeat_timeout_seconds = 1});
  if (is_seen)
    CHECK_THAT(message, Contains(concat("rank ", dead, " shows no life for 1 s")));
  else
    CHECK_THAT(message, Contains("has taken 2 s"));
}

TEST_CASE("mpi hosts: a world of several hosts does not recover", "[comm][mpi]") {
  std::mt19937_64 draw(agreed_seed());
  const PretendedHosts pretended(draw_hosts(draw));
  const std::string message = thrown([](World& world) {
    try {
      world.sum(1.0);
    } catch (const CommError& error) {  // a peer that is through has given the world up already
      CHECK_THAT(error.what(), Contains("the loss is NaN"));
    }
    world.recover("the loss is NaN");
  });
  CHECK_THAT(message,
             Contains("on several hosts, which do not meet again") && Contains("the loss is NaN"));
}
