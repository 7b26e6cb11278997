#include "runtime/comm/mpi/mpi_group.hpp"

#include <algorithm>
#include <numeric>

#include "runtime/comm/mpi/mpi.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

// Of what a role has on its way, in each direction. Larger items go through block by block.
constexpr std::size_t kBlockBytes = 4 << 20;

// What a program holds of an allocation. Freed later, when all ranks have let theirs go.
class ShmMemory final : public SymmetricMemory {
 public:
  ShmMemory(std::byte* data, std::int64_t bytes, std::shared_ptr<bool> let_go)
      : let_go_(std::move(let_go)) {
    data_ = data;
    bytes_ = bytes;
  }
  ~ShmMemory() override { *let_go_ = true; }

 private:
  std::shared_ptr<bool> let_go_;
};

}  // namespace

ShmAllocation::ShmAllocation(MPI_Comm comm, std::int64_t bytes) {
  const std::int64_t asked = round_up(bytes, kPageBytes) + kPageBytes;
  MPI_Info info = MPI_INFO_NULL;
  check(MPI_Info_create(&info), "MPI_Info_create");
  MPI_Info_set(info, "alloc_shared_noncontig", "true");
  void* mine = nullptr;
  const int made = MPI_Win_allocate_shared(asked, 1, info, comm, static_cast<void*>(&mine), &win_);
  MPI_Info_free(&info);
  check(made, "MPI_Win_allocate_shared (is /dev/shm large enough?)");
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  for (int r = 0; r < size; ++r) {
    MPI_Aint there = 0;
    int unit = 0;
    void* base = nullptr;
    check(MPI_Win_shared_query(win_, r, &there, &unit, static_cast<void*>(&base)),
          "MPI_Win_shared_query");
    if (there < asked)
      throw CommError(concat("World::mpi: MPI gives rank ", r, " ", there, " bytes of ", asked,
                             "; use another MPI or Transport::messages"));
    auto* const start = static_cast<std::byte*>(base);
    const auto beyond = reinterpret_cast<std::uintptr_t>(base) % kPageBytes;
    bases.push_back(beyond == 0 ? start : start + (kPageBytes - beyond));
  }
}

MPI_Comm split(MPI_Comm all, int number, int rank) {
  MPI_Comm some = MPI_COMM_NULL;
  check(MPI_Comm_split(all, number, rank, &some), "MPI_Comm_split");
  MPI_Comm_set_errhandler(some, MPI_ERRORS_RETURN);
  return some;
}

void meet_beyond(MPI_Comm all, const ShmWorld& world) {
  MPI_Request all_here = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(all, &all_here), "MPI_Ibarrier");
  for (int look = 0, met = 0;; pause_after(look++)) {
    check(MPI_Test(&all_here, &met, MPI_STATUS_IGNORE), "MPI_Test");
    if (met) return;
    world.expect_fine();
  }
}

namespace {

std::vector<int> all_apart(std::size_t ranks) {
  std::vector<int> hosts(ranks);
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

}  // namespace

MpiGroup::MpiGroup(MPI_Comm all, std::span<const int> hosts, ShmWorld& world, Transport transport,
                   PlainArena& arena)
    : all_(all),
      rank_(rank_in(all)),
      world_(world),
      arena_(arena),
      spans_hosts_(std::ranges::count(hosts, hosts[0]) != std::ssize(hosts)),
      pulls_(!spans_hosts_ && transport == Transport::automatic),
      layout_(transport == Transport::automatic ? std::vector(hosts.begin(), hosts.end())
                                                : all_apart(hosts.size()),
              rank_) {
  MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN);
  host_ = split(all_, hosts[static_cast<std::size_t>(rank_)], rank_);
  int on_host = 1;
  check(MPI_Comm_size(host_, &on_host), "MPI_Comm_size");
  const int rank = rank_in(host_);
  std::vector<int> numbers(static_cast<std::size_t>(on_host));
  const int own = world.rank();
  check(MPI_Allgather(&own, 1, MPI_INT, numbers.data(), 1, MPI_INT, host_), "MPI_Allgather");
  segments_ =
      std::make_unique<ShmAllocation>(host_, static_cast<std::int64_t>(sizeof(GroupSegment)));
  new (segments_->bases[static_cast<std::size_t>(rank)]) GroupSegment;
  check(MPI_Barrier(host_), "MPI_Barrier");  // all segments stand
  shm_ =
      std::make_unique<ShmGroup>(world, views<GroupSegment>(*segments_), std::move(numbers), rank);
}

void MpiGroup::meet() {
  shm_->meet_to_allocate();
  if (spans_hosts_) meet_beyond(all_, world_);
}

std::unique_ptr<Communicator> MpiGroup::make(DeviceContext& context, const GroupSeat& seat,
                                             std::string_view role, StreamId stream) {
  const int number = made_++;
  if (pulls_) return make_shm_communicator(context, *shm_, number, seat, role, stream);
  const std::size_t ranks = seat.ranks.size();
  const std::size_t bytes = ranks > 1 ? std::max(kBlockBytes, ranks * 64) : 0;
  const ShmAllocation& exchange = exchanges_.emplace_back(has_two_levels() ? host_ : MPI_COMM_SELF,
                                                          static_cast<std::int64_t>(2 * bytes));
  std::byte* const own =
      exchange.bases[has_two_levels() ? static_cast<std::size_t>(shm_->rank()) : 0];
  channels_.push_back(std::make_unique<MpiChannel>(all_, world_, std::span(own, bytes)));
  return make_message_communicator(
      context, {*shm_, number, layout_, *channels_.back(), exchange.bases}, seat, role, stream);
}

std::shared_ptr<SymmetricMemory> MpiGroup::allocate(DeviceContext& context, std::int64_t bytes) {
  context.synchronize();  // throws before any rank is inside MPI, where nothing wakes it
  meet();
  std::int64_t range[2] = {bytes, -bytes};
  check(MPI_Allreduce(MPI_IN_PLACE, range, 2, MPI_INT64_T, MPI_MAX, all_), "MPI_Allreduce");
  TESSERA_EXPECT(range[0] == -range[1], "allocate_symmetric: rank ", world_.name_of(world_.rank()),
                 " asks for ", bytes, " bytes, other ranks for ", -range[1], " to ", range[0],
                 "; every rank must ask for the same");
  if (!pulls_ && !has_two_levels()) return arena_.allocate(context, bytes);
  free_let_go();
  const std::int64_t rounded = round_up(bytes, kPageBytes);
  held_.push_back({ShmAllocation(host_, rounded), ++allocations_, std::make_shared<bool>(false)});
  const Held& made = held_.back();
  shm_->add({made.number, rounded, made.allocation.bases});
  return std::make_shared<ShmMemory>(made.allocation.bases[static_cast<std::size_t>(shm_->rank())],
                                     rounded, made.let_go);
}

void MpiGroup::free_let_go() {
  std::vector<int> free;
  for (const Held& held : held_) free.push_back(*held.let_go);
  check(MPI_Allreduce(MPI_IN_PLACE, free.data(), static_cast<int>(free.size()), MPI_INT, MPI_MIN,
                      host_),
        "MPI_Allreduce");
  std::size_t i = 0;
  std::erase_if(held_, [&](Held& held) {
    if (!free[i++]) return false;
    shm_->remove(held.number);
    held.allocation.free();
    return true;
  });
}

void MpiGroup::drain() {
  for (const auto& channel : channels_) channel->drain();
}

// To the end of the process: MPI may still send from them.
void MpiGroup::keep_channels() noexcept {
  for (auto& channel : channels_) {
    [[maybe_unused]] const MpiChannel* const kept = channel.release();
  }
}

bool MpiGroup::is_held() const {
  return std::ranges::any_of(held_, [](const Held& h) { return !*h.let_go; });
}

void MpiGroup::free() noexcept {
  for (Held& held : held_) held.allocation.free();
  segments_->free();
  for (const auto& channel : channels_) channel->free();
  for (ShmAllocation& exchange : exchanges_) exchange.free();
  MPI_Comm_free(&host_);
  MPI_Comm_free(&all_);
}

}  // namespace tessera::comm
