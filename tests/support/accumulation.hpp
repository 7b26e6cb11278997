// When micro-batches are reduced: at once, all together, or over replicas together.
#pragma once

#include "tessera/shard/runtime_control.hpp"

namespace tessera::testing {

enum class Accumulation : std::uint8_t { reduced, unsharded, in_replicas };

// Before a micro-batch of a model that was sharded.
inline void begin_micro_batch(nn::Module& model, Accumulation how, bool is_last) {
  if (how == Accumulation::unsharded) set_requires_gradient_sync(model, is_last);
  if (how == Accumulation::in_replicas) set_requires_all_reduce(model, is_last);
}

}  // namespace tessera::testing
