// Where peers that map this rank's memory find what it sends: in the staging of its role, or in
// symmetric memory, at the same offset on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/comm/processes/shm.hpp"
#include "runtime/comm/pull.hpp"

namespace tessera::comm {

class SharedSends {
 public:
  // Of communicator `number` of `group`; `rank` is this one of `size`, of all hosts.
  SharedSends(const ShmGroup& group, int number, int rank, int size)
      : group_(group), number_(number), rank_(rank), size_(size) {}

  // What of an item's sends is common to all ranks: an all_gather in place sends from the rank's
  // own chunk of recv, everything else from send.
  struct Span {
    const SharedMapping* mapping = nullptr;  // null: the staging
    std::int64_t offset = 0;
    std::int64_t stride = 0;  // from one rank's send to the next
  };
  // Of an item that is not staged; no mapping where peers can't read it.
  Span direct(const Collective& c) const;
  // `staged` is what the StagingPlan says of it.
  Span span(const Collective& c, std::int64_t staged) const {
    return staged == StagingPlan::kDirect ? direct(c) : Span{nullptr, staged, 0};
  }
  // The send of `rank`, which is the one at `on_host` of this host.
  const std::byte* send(const Span& span, int on_host, int rank) const {
    const std::byte* base = span.mapping ? span.mapping->bases[static_cast<std::size_t>(on_host)]
                                         : group_.role(on_host, number_).staging;
    return base + span.offset + rank * span.stride;
  }

  // Throws: ContractError for what peers are to read and can't.
  void expect_readable(const char* group, std::span<const Collective> items) const;
  // Equal on ranks whose sends lie alike.
  std::uint64_t layout_hash(std::span<const Collective> items) const;

 private:
  const ShmGroup& group_;
  const int number_, rank_, size_;
};

}  // namespace tessera::comm
