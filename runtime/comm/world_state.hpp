// What a World holds, for the files that make worlds. Not for other layers.
#pragma once

#include <memory>
#include <span>

#include "tessera/comm/world.hpp"

namespace tessera {

// WorldOptions::threads, or the cores in this thread's affinity mask divided among the `ranks` that
// share it.  Throws: ContractError for a negative number.
int threads_per_rank(const WorldOptions& options, int ranks);

struct World::State : std::enable_shared_from_this<World::State> {
  // Makes the device and the three communicators, collectively where the backend needs it. A world
  // of the kinds that do not exchange messages refuses Transport::messages.
  State(WorldKind kind, int rank, int size, const WorldOptions& options, int threads,
        std::unique_ptr<Backend> backend, std::shared_ptr<ShuffledScheduler> scheduler = nullptr);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // What ~World does. Meshes may hold what is left.
  void end() noexcept;
  // One all_reduce of `values` in place; the host blocks.
  void reduce_scalars(const char* name, std::span<double> values, ReduceOp op);

  const WorldKind kind;
  const int rank, size, threads;
  Device device;  // first: outlives what launches on it
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Communicator> gather, reduce, control;
  std::shared_ptr<std::byte> scalars_memory;
  std::span<double> scalars;  // kAgreed
  LastUse scalars_use;
  int exceptions;         // in flight when the world was made
  bool reported = false;  // a failure of this rank has been thrown to the program
  bool has_ended = false;
  const World shared{std::shared_ptr<State>(std::shared_ptr<State>(), this)};  // for meshes
};

}  // namespace tessera
