// Micro-batches of a step, and which units reduce before the last of them.
#pragma once

#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

inline constexpr int kMicroBatches = 3;

// How micro-batches but the last of a step are reduced.
enum class Way { sync, no_sync, no_sync_of_one, no_sync_of_root, no_all_reduce };

// `one`: a unit of the model.
inline void begin_micro_batch(Way way, nn::Module& model, nn::Module& one, bool is_last) {
  switch (way) {
    case Way::sync:
      return;
    case Way::no_sync:
      return set_requires_gradient_sync(model, is_last);
    case Way::no_sync_of_one:
      return set_requires_gradient_sync(one, is_last);
    case Way::no_sync_of_root:
      return set_requires_gradient_sync(model, is_last, /*recurse=*/false);
    case Way::no_all_reduce:
      return set_requires_all_reduce(model, is_last);
  }
}

// Of gradients that wait for a reduction.
inline std::int64_t unreduced_bytes(const Device& device) {
  const Ledger& ledger = Memory::of(device).ledger();
  return ledger.live_bytes("unsharded gradients") + ledger.live_bytes("postponed sums");
}

inline Tensor micro_batch(const World& world, int step, int micro, DType dtype = f32) {
  const std::int64_t rows = 24 / world.size() / kMicroBatches;
  const std::int64_t first = 24 * step + world.rank() * (24 / world.size()) + micro * rows;
  return positive_rows(5, first, rows, 5, world.device(), dtype);
}

}  // namespace tessera::testing
