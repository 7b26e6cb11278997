// A kernel: the calls of one group on one communicator, on a stream of the emulated GPU.
//
// It sends one message to each peer that its calls concern, its calls and all their data, waits for
// theirs, compares, copies, and ends when its own have been read:
//
//   rank 0   ─ turn ─ write the wire, send ─ wait ─ compare ─ move ─ taken ─ wait until taken ─▶
//   rank 1   ──────── turn ─ write, send ─── wait ─ compare ─ move ─ taken ─ wait ─────────────▶
//
// A broken rule, a fault and an early death of a peer leave it there until its own communicator is
// aborted, as on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/emulator/nccl/state.hpp"

namespace tessera::nccl_double {

// How often a rank had launched on a communicator, known by its hash.
struct Launches {
  std::uint64_t hash, count;
};

// What is wrong with the memory of a group's calls on one communicator; empty: nothing.
std::string overlap_in(const std::vector<Call>& calls, int rank, int ranks);
void launch(const std::shared_ptr<Comm>& comm, std::vector<Call> calls,
            std::vector<Launches> launches, cudaStream_t stream);
bool is_collective(Kind kind);
const char* name_of(Kind kind);

}  // namespace tessera::nccl_double
