// How the ranks of a world agree on groups of some of them.
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
    TESSERA_EXPECT(list.size == 0 || times == list.size, "World::split '", name, "': rank ", r,
                   " gives a group of ", list.size, " ranks, but ", times,
                   " of them give it; every rank of a group must give the same ranks in the same "
                   "order, the same streams and, for a DeviceMesh, the same dimensions");
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
