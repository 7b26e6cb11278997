// What no rank can do as it is asked to: the items of a group are looked at one by one as a call
// takes them, and then beside each other. What is good is counted: its cost, and what ranks agree
// on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "runtime/comm/pull.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

// Throws: ContractError naming the group and what is wrong.
CheckedItems check_items(const char* group, std::span<const Collective> items, int rank, int size);

// The collective writes on its own stream, whose clock is `known`: whatever touched that memory
// before, on any stream, must be ordered before it.
// Throws: ContractError naming the group and both streams.
void check_order(const char* group, const Clock& known, StreamId stream,
                 std::span<const Access> accesses);

// Addresses from begin to before end; none where both are 0.
struct AddressRange {
  std::uintptr_t begin = 0, end = 0;

  bool overlaps(const AddressRange& o) const { return begin < o.end && o.begin < end; }
};

// The bytes of the send and of the recv side; one that this rank does not give has none.
struct ItemSides {
  std::int64_t bytes = 0;  // as item_bytes
  AddressRange send{}, recv{};

  ItemSides() = default;
  ItemSides(const Collective& c, int rank, int size);
  bool clash(const ItemSides& o) const {
    return recv.overlaps(o.recv) || recv.overlaps(o.send) || send.overlaps(o.recv);
  }
};

class ItemChecks {
 public:
  ItemChecks(const char* group, int rank, int size)
      : group_(group), rank_(rank), size_(size), staging_(size) {}

  // Of the next item: its bytes, as item_bytes.  Throws: ContractError that names it.
  std::int64_t add(const Collective& c, std::size_t item);
  // No item may write what another reads or writes: they run in any order. Groups are laid out one
  // item after another, in one range or in one for sends and one for recvs, which is seen as they
  // are added; only others are compared pair by pair.  Throws: ContractError that names two.
  void expect_apart(std::span<const Collective> items) const;

 private:
  const char* group_;
  int rank_, size_;
  StagingPlan staging_;
  AddressRange sends_, recvs_, all_;
  bool in_one_ = true, in_two_ = true;
};

}  // namespace tessera::comm
