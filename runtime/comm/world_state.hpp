// What a World holds, for the files that make worlds. Not for other layers.
#pragma once

#include <array>
#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/world.hpp"

namespace tessera {

// WorldOptions::threads, or the cores in this thread's affinity mask divided among the `ranks` that
// share it.  Throws: ContractError for a negative number.
int threads_per_rank(const WorldOptions& options, int ranks);

// What a RankGroup holds. Its world's state outlives it.
struct RankGroup::State {
  // Collective over the group where the backend needs it.
  State(const Device& device, const bool& has_ended, GroupSeat seat, const GroupStreams& streams,
        World::Backend::Group* backend);
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::array<Communicator*, 3> communicators() const {
    return {gather.get(), reduce.get(), control.get()};
  }
  bool holds(std::span<const int> ranks) const;  // all of them
  // One all_reduce of `values` in place; the host blocks.
  void reduce_scalars(const char* name, std::span<double> values, ReduceOp op);

  const Device& device;
  const bool& has_ended;  // the world
  const GroupSeat seat;
  const GroupStreams streams;
  World::Backend::Group* const backend;
  std::unique_ptr<Communicator> gather, reduce, control;
  std::shared_ptr<std::byte> scalars_memory;
  std::span<double> scalars;  // kAgreed
  LastUse scalars_use;
  RankGroup::Workspace workspace{};  // empty until asked for, and when the world has ended
  const RankGroup handle{*this};
};

struct World::State : std::enable_shared_from_this<World::State> {
  // Makes the device and the group of all ranks, collectively where the backend needs it. A world
  // of the kinds that do not exchange messages refuses Transport::messages.
  State(WorldKind kind, int rank, int size, const WorldOptions& options, int threads,
        std::unique_ptr<Backend> backend, std::shared_ptr<HostScheduler> scheduler = nullptr);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // Nobody waits any more for what the rank has not committed; on return nothing is queued.
  void halt(const std::string& reason);
  // Ends the world; meshes may hold what is left. `failure`: of the rank, if it has failed. Returns
  // what nobody has heard of yet, or null.
  std::exception_ptr end(const std::string& failure) noexcept;
  // Over all groups of this rank.
  template <class F>
  void for_each_group(const F& f) {
    f(all);
    for (const auto& group : groups) f(*group);
  }
  // Whether any rank asks for a group that is not there yet.  Throws: ContractError, on every rank,
  // unless the lists of all ranks fit together.
  bool agree_on_split(std::string_view name, const GroupSeat& seat, const GroupStreams& streams,
                      bool is_new);

  const WorldKind kind;
  const int rank, size, threads;
  Device device;  // first: outlives what launches on it
  std::unique_ptr<Backend> backend;
  bool has_ended = false;
  RankGroup::State all;
  std::vector<std::unique_ptr<RankGroup::State>> groups;  // made by `split`
  int exceptions;                                         // in flight when the world was made
  bool reported = false;  // a failure of this rank has been thrown to the program
  const World shared{std::shared_ptr<State>(std::shared_ptr<State>(), this)};  // for meshes
};

}  // namespace tessera
