// Ranks that communicate: all of a world, or some of them (PyTorch: process group).
//
//   world                    0 1 2 3 4 5 6 7      a World is the group of all its ranks
//   split("dp_shard", ...)   0 1 2 3 │ 4 5 6 7    each rank is in one of these
//
// A group has communicators, symmetric memory, a sequence of calls and a fingerprint of its own.
// There is one order over all collectives of a world. A rank issues its part of it, leaving out the
// groups that it is not in. The first unfinished collective in that order waits for none behind it,
// so it ends. So ranks never wait for each other crosswise. A group's fingerprint rolls over the
// calls of the groups around it, too. Ranks that put a group's call before, and after, one of the
// world hear of it. If the host blocks in one of the two, only the timeout ends the wait.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "tessera/comm/flight_recorder.hpp"

namespace tessera {

class DeviceContext;

// The streams of a rank on which the communicators of a group run.
struct GroupStreams {
  StreamId gather = StreamId::gather;
  StreamId reduce = StreamId::reduce;
  StreamId control = StreamId::compute;

  bool operator==(const GroupStreams&) const = default;
};

// One rank's view of a group; World::split makes it. "Collective" means over the group: each of its
// ranks calls, in the same order. It lives as long as what World::share gives.
class RankGroup {
 public:
  // The most numbers that `sum`, `max` and World::resume agree on in one call.
  static constexpr std::size_t kAgreed = 8;

  const std::string& name() const noexcept;     // "world" for all ranks
  int rank() const noexcept;                    // within the group
  int size() const noexcept;                    // ranks of the group
  std::span<const int> ranks() const noexcept;  // their numbers in the world, in their order here
  const Device& device() const noexcept;

  // Communicators over the group's ranks, each with its own order. Gathers run on the gather
  // stream, reductions on the reduce stream, and control (losses, norms, agreement) on the compute
  // stream, unless GroupStreams say otherwise.
  Communicator& gather() const noexcept;
  Communicator& reduce() const noexcept;
  Communicator& control() const noexcept;

  // The calls of all communicators of this group on this rank.
  const FlightRecorder& flight_recorder() const noexcept;
  // Whether sums are taken in rank order, so that their bits depend on the number of ranks alone.
  // They are not where a vendor's library sums. Nor are they where the group has several ranks on a
  // host and others elsewhere: then each host's ranks are added first, and bits depend on who lies
  // where.
  bool sums_are_ordered() const noexcept;
  // Whether symmetric memory is a window of the communicators that gather and reduce, as
  // NcclOptions::windows has it. What is reduced moves without a copy then if the sums are to lie
  // in symmetric memory, too.
  bool has_windows() const noexcept;
  // The largest gather and the largest reduction that come, in bytes of all ranks' chunks.
  struct Sizes {
    std::int64_t gathered_bytes = 0, reduced_bytes = 0;
    DType reduced_as = DType::f32;
  };
  // Tells the communicators what will come; the sharding engine does, before its first. Where
  // NcclOptions leave open how to gather or to reduce, a group's first call measures the ways
  // beside compute, rank 0's medians decide, and its log has one line with all figures. Otherwise
  // it does nothing. Collective. Throws: CommError.
  void expect_sizes(const Sizes& sizes) const;

  // Makes memory that peers can read. It is reserved, but not booked in the ledger. Collective:
  // every rank calls with the same size. `purpose` is for the message of peers that do something
  // else.
  //   Throws: ContractError for no bytes, and after the world has ended.
  std::shared_ptr<SymmetricMemory> allocate_symmetric(std::int64_t bytes,
                                                      std::string_view purpose = "a program") const;
  // Symmetric memory through which tensors are exchanged, piece by piece; see
  // distributed/collectives.hpp. The first call makes it, and is collective.
  static constexpr std::int64_t kWorkspaceBytes = 4 << 20;
  struct Workspace {
    std::shared_ptr<SymmetricMemory> memory;
    LastUse use;
  };
  Workspace& workspace() const;
  // The host sleeps until every rank is here.
  void barrier() const;
  // Each of `values`, at most kAgreed, becomes its sum over all ranks, or the largest (NaN if any
  // is NaN), on every rank. The host blocks. Collective, under `name`. Where nothing runs
  // (`virtual`), all ranks count as alike.
  void sum(std::span<double> values, const char* name = "sum") const;
  void max(std::span<double> values, const char* name = "max") const;
  double sum(double value) const;
  double max(double value) const;

 protected:
  struct State;
  explicit RankGroup(State& state) noexcept : group_(&state) {}

  State* group_;
};

}  // namespace tessera
