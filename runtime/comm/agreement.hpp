// What ranks tell each other before a collective, and the check that all of them mean the same one.
// Plain data of fixed size: it lies in shared memory, between threads or between processes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/comm/flight_recorder.hpp"

namespace tessera::comm {

inline constexpr const char* kWorldHasEnded =
    "its World has ended; keep the World for as long as a model that is sharded over it trains";

// Items that a message can tell apart; the fingerprint covers all of them.
inline constexpr int kShownItems = 16;

// One rank's side of one collective.
struct Published {
  struct Item {
    std::int64_t count = 0;
    CollectiveKind kind = CollectiveKind::barrier;
    DType dtype = DType::f32;
    ReduceOp reduce = ReduceOp::sum;
    std::int32_t root = 0, target = 0;

    bool operator==(const Item&) const = default;
  };

  std::uint64_t seq = 0;               // in the sequence of all calls of the rank
  std::uint64_t fingerprint = 0;       // over all calls up to this one
  std::uint64_t previous = 0;          // over all calls before it
  std::uint64_t send_layout_hash = 0;  // where they must be equal
  Progress progress{};
  std::uint64_t around = 0;  // FlightEntry's
  std::int32_t n_items = 0;
  char name[68] = {};  // cut where it is longer
  Item items[kShownItems];
};
static_assert(std::is_trivially_copyable_v<Published>);

// A group as the body of its operation carries it.
struct GroupCall {
  const char* name = "";
  std::uint64_t seq = 0, fingerprint = 0, previous = 0, around = 0;
  Progress progress{};
  const Collective* prepared = nullptr;  // null: `single` is the only item
  std::int64_t n_items = 1;
  Collective single;

  // `group` outlives the call where it is prepared; otherwise it is one item, which is copied.
  GroupCall(const FlightEntry& entry, std::uint64_t fingerprint_before, const char* op,
            std::span<const Collective> group, bool is_prepared)
      : name(op),
        seq(entry.seq),
        fingerprint(entry.fingerprint),
        previous(fingerprint_before),
        around(entry.around),
        progress(entry.progress),
        prepared(is_prepared ? group.data() : nullptr),
        n_items(static_cast<std::int64_t>(group.size())) {
    if (!is_prepared) single = group[0];
  }

  std::span<const Collective> items() const {
    return {prepared ? prepared : &single, static_cast<std::size_t>(n_items)};
  }
};

// What a communicator of the group is called: "gather" in the world, else "gather of dp_shard".
std::string role_name(const GroupSeat& seat, std::string_view role);

void publish(Published& out, const GroupCall& call, std::uint64_t send_layout_hash);

// Every rank calls it with what all ranks published, and throws the same or nothing. `names` are
// their numbers in the world. `recorders` are all ranks' where they can be seen, else none: they
// tell in which call the ranks parted when it is not this one.
//
// Throws: CommError naming the first two ranks that disagree, both operations and the number of the
// call.
void check_agreement(std::span<const Published* const> ranks, std::span<const int> names,
                     const std::string& role, std::span<const FlightRecorder* const> recorders);

// Of ranks that parted in these calls, in the backward of a forward or not (0): what one of them
// forgot to say. Empty where no backward tells them apart.
std::string backward_remedy(std::uint64_t backward_of, std::uint64_t other = 0);

// "call 7: rank 0 submitted ..., but rank 2 submitted ..." for the first call in which two
// recorders differ; empty where there is none.
std::string describe_difference(const FlightRecorder& a, int rank_a, const FlightRecorder& b,
                                int rank_b);

// The same, where of `b` only these calls have come, oldest first.
std::string describe_difference(const FlightRecorder& a, int rank_a, std::span<const FlightEntry> b,
                                int rank_b);

// What is wrong where ranks of a group have made other numbers of steps; empty for nothing.
std::string describe_steps(std::string_view group, std::uint64_t steps, std::uint64_t other);

// The ranks of `recorders` and what they are called.
using Recorders = std::vector<const FlightRecorder*>;

// Why a call of rank `own` that has waited for `timeout_s` is given up: the call, who is missing,
// and where everyone is. Empty while none is late.
std::string describe_late(const Recorders& recorders, int own, double timeout_s,
                          std::span<const int> names);
// Why a call of rank `own` can't be met by rank `ended`, which submits no more; empty if it can.
std::string describe_ended(const Recorders& recorders, int own, int ended,
                           std::span<const int> names);

}  // namespace tessera::comm
