#include "runtime/comm/processes/process_group.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "runtime/comm/plain_memory.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

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

ProcessGroup::ProcessGroup(std::unique_ptr<Bootstrap> all, std::string name,
                           std::span<const int> hosts, ShmWorld& world)
    : all_(std::move(all)),
      host_(all_->split(hosts[static_cast<std::size_t>(all_->rank())], all_->rank())),
      name_(std::move(name)),
      segments_(host_->share(static_cast<std::int64_t>(sizeof(GroupSegment)))) {
  const int rank = host_->rank();
  std::vector<int> numbers = host_->exchange(world.rank());
  new (segments_->bases()[static_cast<std::size_t>(rank)]) GroupSegment;
  host_->meet();  // all segments stand
  shm_ =
      std::make_unique<ShmGroup>(world, views<GroupSegment>(*segments_), std::move(numbers), rank);
}

std::unique_ptr<Communicator> ProcessGroup::make_communicator(DeviceContext& context, int number,
                                                              const GroupSeat& seat,
                                                              std::string_view role,
                                                              StreamId stream) {
  return make_shm_communicator(context, *shm_, number, seat, role, stream);
}

std::shared_ptr<SymmetricMemory> ProcessGroup::allocate(DeviceContext& context, std::int64_t bytes,
                                                        std::string_view purpose) {
  context.synchronize();  // throws before any rank is in the bootstrap, where nothing wakes it
  meet(context.intern(purpose));
  const std::vector<std::int64_t> asked = all_->exchange(bytes);
  const auto [least, most] = std::ranges::minmax(asked);
  const ShmWorld& world = shm_->world();
  TESSERA_EXPECT(least == most, "allocate_symmetric: rank ", world.name_of(world.rank()),
                 " asks for ", bytes, " bytes for ", purpose, ", other ranks for ", least, " to ",
                 most, "; every rank must ask for the same");
  return make_memory(context, bytes);
}

std::shared_ptr<SymmetricMemory> ProcessGroup::make_memory(DeviceContext&, std::int64_t bytes) {
  free_let_go();
  const std::int64_t rounded = round_up(bytes, kPageBytes);
  held_.push_back({host_->share(rounded), ++allocations_, std::make_shared<bool>(false)});
  const Held& made = held_.back();
  shm_->add({made.number, rounded, made.memory->bases()});
  return std::make_shared<ShmMemory>(made.memory->bases()[static_cast<std::size_t>(shm_->rank())],
                                     rounded, made.let_go);
}

void ProcessGroup::free_let_go() {
  std::vector<std::byte> own, all(held_.size() * static_cast<std::size_t>(host_->size()));
  for (const Held& held : held_) own.push_back(static_cast<std::byte>(*held.let_go));
  host_->exchange(own, all.data());
  std::size_t i = 0;
  std::erase_if(held_, [&](Held& held) {
    bool is_free = true;
    for (std::size_t at = i++; at < all.size(); at += own.size())
      is_free = is_free && all[at] != std::byte{0};
    if (!is_free) return false;
    shm_->remove(held.number);
    held.memory->free();
    return true;
  });
}

std::string ProcessGroup::parting() const {
  const std::vector<std::uint64_t> steps = all_->exchange(shm_->recorder(shm_->rank()).steps());
  const auto [least, most] = std::ranges::minmax(steps);
  return describe_steps(name_, most, least);
}

bool ProcessGroup::is_held() const {
  return std::ranges::any_of(held_, [](const Held& h) { return !*h.let_go; });
}

void ProcessGroup::free() noexcept {
  for (const Held& held : held_) held.memory->free();
  segments_->free();
  host_->free();
  all_->free();
}

}  // namespace tessera::comm
