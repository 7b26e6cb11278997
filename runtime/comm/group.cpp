#include "tessera/comm/group.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {

RankGroup::State::State(const Device& on, const bool& world_has_ended, GroupSeat where,
                        const GroupStreams& s, World::Backend::Group* made)
    : device(on),
      has_ended(world_has_ended),
      seat(std::move(where)),
      streams(s),
      backend(made),
      gather(backend->make(device.context(), seat, "gather", streams.gather)),
      reduce(backend->make(device.context(), seat, "reduce", streams.reduce)),
      control(backend->make(device.context(), seat, "control", streams.control)),
      scalars_memory(host_memory(device.context(), std::int64_t{kAgreed * sizeof(double)})),
      scalars(reinterpret_cast<double*>(scalars_memory.get()), kAgreed) {}

bool RankGroup::State::holds(std::span<const int> ranks) const {
  return std::ranges::all_of(
      ranks, [&](int rank) { return std::ranges::find(seat.ranks, rank) != seat.ranks.end(); });
}

void RankGroup::State::reduce_scalars(const char* name, std::span<double> values, ReduceOp op) {
  TESSERA_EXPECT(values.size() <= kAgreed, "World::", name, ": ", values.size(),
                 " numbers; give at most ", kAgreed);
  if (values.empty()) return;
  const std::size_t bytes = values.size_bytes();
  device.context().host_writes(scalars.data(), bytes);
  std::ranges::copy(values, scalars.begin());
  const Access access{&scalars_use, scalars.data(), scalars.data() + values.size(),
                      AccessMode::write};
  control->submit({.send = scalars.data(),
                   .recv = scalars.data(),
                   .count = static_cast<std::int64_t>(values.size()),
                   .kind = CollectiveKind::all_reduce,
                   .dtype = f64,
                   .reduce = op},
                  name, {&access, 1});
  device.block(device.stream(streams.control).record());
  device.context().host_reads(scalars.data(), bytes);
  std::ranges::copy(scalars.first(values.size()), values.begin());
}

const std::string& RankGroup::name() const noexcept { return group_->seat.group; }
int RankGroup::rank() const noexcept { return group_->seat.rank; }
int RankGroup::size() const noexcept { return group_->seat.size(); }
std::span<const int> RankGroup::ranks() const noexcept { return group_->seat.ranks; }
const Device& RankGroup::device() const noexcept { return group_->device; }
Communicator& RankGroup::gather() const noexcept { return *group_->gather; }
Communicator& RankGroup::reduce() const noexcept { return *group_->reduce; }
Communicator& RankGroup::control() const noexcept { return *group_->control; }
const FlightRecorder& RankGroup::flight_recorder() const noexcept {
  return group_->backend->recorder();
}
bool RankGroup::sums_are_ordered() const noexcept { return group_->backend->sums_are_ordered(); }
bool RankGroup::has_windows() const noexcept { return group_->backend->has_windows(); }

void RankGroup::expect_sizes(const Sizes& sizes) const {
  group_->backend->expect_sizes(*this, sizes);
}

std::shared_ptr<SymmetricMemory> RankGroup::allocate_symmetric(std::int64_t bytes,
                                                               std::string_view purpose) const {
  TESSERA_EXPECT(!group_->has_ended, "allocate_symmetric: ", comm::kWorldHasEnded);
  TESSERA_EXPECT(bytes > 0, "allocate_symmetric: ", bytes, " bytes; ask for at least 1");
  const Device device = group_->device;
  auto memory = group_->backend->allocate(device.context(), bytes, purpose);
  Memory::of(device).add_arena_bytes(memory->bytes());
  SymmetricMemory* const data = memory.get();
  const auto tell = [](const Device& on, const SymmetricMemory& arena, MemoryEvent::Kind kind) {
    on.context().tell({.kind = kind,
                       .begin = arena.data(),
                       .end = arena.data() + arena.bytes(),
                       .owner = "symmetric memory"});
  };
  tell(device, *memory, MemoryEvent::Kind::acquired);
  return {data, [memory = std::move(memory), device, tell](SymmetricMemory*) mutable {
            Memory::of(device).add_arena_bytes(-memory->bytes());
            tell(device, *memory, MemoryEvent::Kind::released);
            try {
              device.context().block_on_replays();
            } catch (...) {
              device.context().fail_late();
            }
            memory.reset();
          }};
}

RankGroup::Workspace& RankGroup::workspace() const {
  if (!group_->workspace.memory)
    group_->workspace.memory =
        allocate_symmetric(kWorkspaceBytes, "the first collective on tensors of this group");
  return group_->workspace;
}

void RankGroup::barrier() const {
  group_->control->submit({.kind = CollectiveKind::barrier}, "barrier", {});
  group_->device.block(group_->device.stream(group_->streams.control).record());
}

void RankGroup::sum(std::span<double> values, const char* name) const {
  group_->reduce_scalars(name, values, ReduceOp::sum);
  if (!group_->device.runs_bodies())
    for (double& value : values) value *= size();
}

void RankGroup::max(std::span<double> values, const char* name) const {
  group_->reduce_scalars(name, values, ReduceOp::max);
}

double RankGroup::sum(double value) const {
  sum({&value, 1});
  return value;
}

double RankGroup::max(double value) const {
  max({&value, 1});
  return value;
}

}  // namespace tessera
