// State by name: tensors, each with what of a whole it is. Modules give and take such dicts; see
// nn/state.hpp.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Values of one parameter or buffer: the rows that `spec` owns.
struct StateTensor {
  StateTensor() = default;
  StateTensor(Tensor whole) : values(std::move(whole)), spec{values.shape(), 1, 0} {}
  StateTensor(Tensor rows, const ShardSpec& of) : values(std::move(rows)), spec(of) {}

  Tensor values;   // [rows, ...]
  ShardSpec spec;  // of which global shape, and of which rank of how many
};
using StateDict = std::map<std::string, StateTensor, std::less<>>;

// What a state dict has of what is sharded.
enum class StateForm : std::uint8_t {
  sharded,  // this rank's rows
};
struct StateDictOptions {
  StateForm form = StateForm::sharded;
};

}  // namespace tessera
