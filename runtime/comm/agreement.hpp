// What ranks tell each other before a collective, and the check that all of them mean the same one.
// Plain data of fixed size: it lies in shared memory, between threads or between processes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

// Items that a message can tell apart; the fingerprint covers all of them.
inline constexpr int kShownItems = 16;

// One rank's side of one joint operation.
struct Published {
  struct Item {
    std::int64_t count = 0;
    CollectiveKind kind = CollectiveKind::barrier;
    DType dtype = DType::f32;
    std::int32_t root = 0;

    bool operator==(const Item&) const = default;
  };

  std::uint64_t sequence = 0;     // 1 for the first operation of the communicator
  std::uint64_t fingerprint = 0;  // over all operations up to this one
  std::uint64_t place = 0;        // over the offsets of the sends, where they must be equal
  std::int32_t n_items = 0;
  char name[68] = {};  // cut where it is longer
  Item items[kShownItems];
};
static_assert(std::is_trivially_copyable_v<Published>);

// A group as the body of its operation carries it.
struct GroupCall {
  const char* name = "";
  std::uint64_t sequence = 0, fingerprint = 0;
  const Collective* prepared = nullptr;  // null: `single` is the only item
  std::int64_t n_items = 1;
  Collective single;

  GroupCall(const Communicator& communicator, const char* op, std::span<const Collective> group,
            bool is_prepared)
      : name(op),
        sequence(communicator.submitted()),
        fingerprint(communicator.fingerprint()),
        prepared(is_prepared ? group.data() : nullptr),
        n_items(static_cast<std::int64_t>(group.size())) {
    if (!is_prepared) single = group[0];
  }

  std::span<const Collective> items() const {
    return {prepared ? prepared : &single, static_cast<std::size_t>(n_items)};
  }
};

void publish(Published& out, const GroupCall& call, std::uint64_t place);

// Every rank calls it with what all ranks published, and throws the same or nothing.
//
// Throws: CommError naming the first two ranks that disagree, both operations and the number of the
// call.
void check_agreement(std::span<const Published* const> ranks, const std::string& role);

}  // namespace tessera::comm
