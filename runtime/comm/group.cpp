// Groups of ranks: what they offer, and how a world is split into them.
#include "tessera/comm/group.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
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

std::shared_ptr<SymmetricMemory> RankGroup::allocate_symmetric(std::int64_t bytes) const {
  TESSERA_EXPECT(!group_->has_ended, "allocate_symmetric: ", comm::kWorldHasEnded);
  TESSERA_EXPECT(bytes > 0, "allocate_symmetric: ", bytes, " bytes; ask for at least 1");
  const Device device = group_->device;
  auto memory = group_->backend->allocate(device.context(), bytes);
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
  if (!group_->workspace.memory) group_->workspace.memory = allocate_symmetric(kWorkspaceBytes);
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

// ---- Splitting

namespace {

// What a rank tells all others of its list.
struct Listed {
  std::uint64_t hash;  // of name, ranks and streams
  std::int64_t size;
  std::int64_t is_new;  // a group that is not there yet
};

std::string to_string(std::span<const int> ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "{" : ", ", rank);
  return text + "}";
}

GroupSeat seat_in(std::string_view name, std::span<const int> ranks, const World& world) {
  TESSERA_EXPECT(!name.empty() && name != kWorldGroup, "World::split: the group has the name '",
                 name, "'; give it one of its own");
  GroupSeat seat{.group = std::string(name), .ranks = {ranks.begin(), ranks.end()}};
  if (ranks.empty()) return seat;
  std::vector<int> sorted = seat.ranks;
  std::ranges::sort(sorted);
  TESSERA_EXPECT(sorted.front() >= 0 && sorted.back() < world.size() &&
                     std::ranges::adjacent_find(sorted) == sorted.end(),
                 "World::split '", name, "': the ranks are ", to_string(ranks),
                 "; give each once, from 0 to ", world.size() - 1);
  const auto own = std::ranges::find(seat.ranks, world.rank());
  TESSERA_EXPECT(own != seat.ranks.end(), "World::split '", name, "': rank ", world.rank(),
                 " gives ", to_string(ranks), "; give the group that this rank is in, or none");
  seat.rank = static_cast<int>(own - seat.ranks.begin());
  return seat;
}

}  // namespace

// Every rank tells every other what its list is, and all come to the same verdict: a list of n
// ranks is given by n ranks, each of which is in it.
bool World::State::agree_on_split(std::string_view name, const GroupSeat& seat,
                                  const GroupStreams& streams, bool is_new) {
  Listed mine{fnv1a(name), seat.size(), is_new};
  for (const int member : seat.ranks)
    mine.hash = fnv1a(static_cast<std::uint64_t>(member), mine.hash);
  for (const StreamId s : {streams.gather, streams.reduce, streams.control})
    mine.hash = fnv1a(static_cast<std::uint64_t>(index(s)), mine.hash);
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t bytes = ranks * sizeof(Listed);
  DeviceContext& context = device.context();
  const auto memory = host_memory(context, static_cast<std::int64_t>(bytes));
  auto* const all_lists = reinterpret_cast<Listed*>(memory.get());
  LastUse use;
  const Access access{&use, memory.get(), memory.get() + bytes, AccessMode::write};
  context.host_writes(memory.get(), bytes);
  std::fill_n(all_lists, ranks, mine);
  all.control->submit({.send = all_lists,
                       .recv = all_lists,
                       .count = sizeof(Listed) / sizeof(std::int64_t),
                       .kind = CollectiveKind::all_to_all,
                       .dtype = i64},
                      context.intern(concat("split '", name, "' of a mesh or world")),
                      {&access, 1});
  device.block(device.compute().record());
  context.host_reads(memory.get(), bytes);
  if (kind == WorldKind::emulated || size == 1) return is_new;  // no peers
  std::map<std::pair<std::uint64_t, std::int64_t>, std::int64_t> given;
  for (std::size_t r = 0; r < ranks; ++r) ++given[{all_lists[r].hash, all_lists[r].size}];
  for (std::size_t r = 0; r < ranks; ++r) {
    const Listed& list = all_lists[r];
    const std::int64_t times = given[{list.hash, list.size}];
    TESSERA_EXPECT(
        list.size == 0 || times == list.size, "World::split '", name, "': rank ", r,
        " gives a group of ", list.size, " ranks, but ", times,
        " of them give it; each of its ranks gives the same ranks in the same order, and "
        "the same streams, and a DeviceMesh the same dimensions");
    is_new |= list.is_new != 0;
  }
  return is_new;
}

const RankGroup* World::split(std::string_view name, std::span<const int> ranks,
                              const GroupStreams& streams) const {
  State& s = *state_;
  TESSERA_EXPECT(!s.has_ended, "World::split: ", comm::kWorldHasEnded);
  GroupSeat seat = seat_in(name, ranks, *this);
  const RankGroup* known = nullptr;
  for (const auto& group : s.groups)
    if (group->seat.group == name && group->seat.ranks == seat.ranks) {
      TESSERA_EXPECT(group->streams == streams, "World::split '", name, "': the group of ranks ",
                     to_string(ranks), " runs on other streams; give this one another name");
      known = &group->handle;
    }
  const bool is_new = !ranks.empty() && !known;
  if (!s.agree_on_split(name, seat, streams, is_new)) return known;
  if (is_new)
    s.for_each_group([&](const RankGroup::State& other) {
      if (other.holds(ranks)) seat.around.push_back(&other.backend->recorder());
    });
  World::Backend::Group* const backend =
      s.backend->group(s.device.context(), is_new ? seat : GroupSeat{});
  if (!is_new) return known;
  s.groups.push_back(
      std::make_unique<RankGroup::State>(s.device, s.has_ended, std::move(seat), streams, backend));
  return &s.groups.back()->handle;
}

}  // namespace tessera
