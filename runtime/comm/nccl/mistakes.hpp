// Mistakes in how NCCL is called, which tests make on purpose: each must end in an error that says
// what is wrong.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera::comm {

enum class NcclMistake : std::uint8_t {
  none,
  keeps_graphs,              // they are there when communicators are aborted, or a world ends
  aborts_one_by_one,         // instead of all communicators of a rank at once
  uses_an_old_id,            // that of the attempt before
  makes_in_other_order,      // rank 1 its communicators
  registers_in_other_order,  // rank 1 its memory
  asks_captured_events
};

// Of all ranks of the process.
inline std::atomic<NcclMistake> nccl_mistake{NcclMistake::none};
inline bool makes(NcclMistake mistake) noexcept {
  return nccl_mistake.load(std::memory_order_relaxed) == mistake;
}

}  // namespace tessera::comm
