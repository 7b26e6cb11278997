#include "runtime/comm/mpi/mpi_group.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/comm/mpi/mpi.hpp"

namespace tessera::comm {
namespace {

// Of what a role has on its way, in each direction. Larger items go through block by block.
constexpr std::size_t kBlockBytes = 4 << 20;

MPI_Comm comm_of(const Bootstrap& bootstrap) {
  return static_cast<const MpiBootstrap&>(bootstrap).comm();
}

std::vector<int> all_apart(std::size_t ranks) {
  std::vector<int> hosts(ranks);
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

}  // namespace

void meet_beyond(const Bootstrap& all, const ShmWorld& world) {
  MPI_Request all_here = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(comm_of(all), &all_here), "MPI_Ibarrier");
  for (int look = 0, met = 0;; pause_after(look++)) {
    check(MPI_Test(&all_here, &met, MPI_STATUS_IGNORE), "MPI_Test");
    if (met) return;
    world.expect_fine();
  }
}

MpiGroup::MpiGroup(std::unique_ptr<Bootstrap> all, std::string name, std::span<const int> hosts,
                   ShmWorld& world, Transport transport, PlainArena& arena)
    : ProcessGroup(std::move(all), std::move(name), hosts, world),
      arena_(arena),
      spans_hosts_(std::ranges::count(hosts, hosts[0]) != std::ssize(hosts)),
      pulls_(!spans_hosts_ && transport == Transport::automatic),
      layout_(transport == Transport::automatic ? std::vector(hosts.begin(), hosts.end())
                                                : all_apart(hosts.size()),
              this->all().rank()) {}

void MpiGroup::meet(const char* why) {
  ProcessGroup::meet(why);
  if (spans_hosts_) meet_beyond(all(), shm().world());
}

std::unique_ptr<Communicator> MpiGroup::make_communicator(DeviceContext& context, int number,
                                                          const GroupSeat& seat,
                                                          std::string_view role, StreamId stream) {
  if (pulls_) return ProcessGroup::make_communicator(context, number, seat, role, stream);
  const std::size_t ranks = seat.ranks.size();
  const std::size_t bytes = ranks > 1 ? std::max(kBlockBytes, ranks * 64) : 0;
  const auto both = static_cast<std::int64_t>(2 * bytes);
  exchanges_.push_back(has_two_levels() ? host().share(both) : share_with_nobody(both));
  const std::vector<std::byte*>& exchange = exchanges_.back()->bases();
  std::byte* const own = exchange[has_two_levels() ? static_cast<std::size_t>(shm().rank()) : 0];
  channels_.push_back(
      std::make_unique<MpiChannel>(comm_of(all()), shm().world(), std::span(own, bytes)));
  return make_message_communicator(context, {shm(), number, layout_, *channels_.back(), exchange},
                                   seat, role, stream);
}

std::shared_ptr<SymmetricMemory> MpiGroup::make_memory(DeviceContext& context, std::int64_t bytes) {
  if (!pulls_ && !has_two_levels()) return arena_.allocate(context, bytes);
  return ProcessGroup::make_memory(context, bytes);
}

void MpiGroup::drain() {
  for (const auto& channel : channels_) channel->drain();
}

void MpiGroup::keep_channels() noexcept {
  for (auto& channel : channels_) {
    [[maybe_unused]] const MpiChannel* const kept = channel.release();
  }
}

void MpiGroup::free() noexcept {
  for (const auto& channel : channels_) channel->free();
  for (const auto& exchange : exchanges_) exchange->free();
  ProcessGroup::free();
}

}  // namespace tessera::comm
