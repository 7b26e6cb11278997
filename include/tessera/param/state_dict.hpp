// State by name: tensors, each with what of a whole it is. Modules and optimizers give and take
// such dicts; see nn/state.hpp and Optimizer::state_dict.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

class DeviceMesh;
class RankGroup;

// Values of one parameter, buffer or moment: the rows of `spec`.
struct StateTensor {
  StateTensor() = default;
  StateTensor(Tensor whole) : values(std::move(whole)), spec{values.shape(), 1, 0} {}
  StateTensor(Tensor rows, const ShardSpec& of, std::shared_ptr<const DeviceMesh> over = {},
              std::uint64_t updates = 0)
      : values(std::move(rows)), spec(of), mesh(std::move(over)), steps(updates) {}

  Tensor values;                             // [rows, ...]; a scalar's on every rank
  ShardSpec spec;                            // of which global shape, and of which rank of how many
  std::shared_ptr<const DeviceMesh> mesh{};  // these ranks, of one dimension; null: not known
  std::uint64_t steps = 0;  // updates by optimizers; ranks compare them before it is gathered
};
using StateDict = std::map<std::string, StateTensor, std::less<>>;

// What a state dict has of what is sharded.
enum class StateForm : std::uint8_t {
  sharded,  // this rank's rows, copied; no communication
  view,     // this rank's rows as they lie, to be read before they are next updated: also by a load
            // into the same model under other names, which reads what it has written
  full,     // whole tensors, copied; collective over each mesh
};
// Who gets whole tensors; the other ranks take part and get an empty dict. Of rank 0 alone would be
// what lies in no unit (ShardOptions::ignored): a ContractError where that differs between ranks.
enum class StateRanks : std::uint8_t { every_rank, rank_0 };
enum class StateMemory : std::uint8_t {
  device,  // where the model is
  host,    // on a CPU device of the dict's own, which all ranks may load at once (PyTorch:
           // cpu_offload)
};
struct StateDictOptions {
  StateForm form = StateForm::sharded;
  StateRanks ranks = StateRanks::every_rank;  // of `full`
  StateMemory memory = StateMemory::device;   // of `sharded` and `full`
};

// Each name that fits `pattern` as a whole becomes `replacement`. A * stands for any text, dots and
// none too, and the first of `replacement` for what the first of `pattern` does, and so on; where
// several would do, the first ones stand for as little as can be.
struct Rename {
  std::string pattern, replacement;
};
struct LoadOptions {
  // Whether names that are missing or unexpected are an error. A tensor of another shape or kind
  // always is.
  bool strict = true;
  // Null: each rank loads what it gives itself. Else rank 0 of this group alone has whole tensors,
  // which it sends one at a time; what other ranks give is not looked at. Collective over the
  // group, in which every rank has a model of the same names and shapes. A model on meta is
  // materialized on the group's device first (PyTorch: broadcast_from_rank0). What lies in no unit,
  // and differs between ranks, is not overwritten: a ContractError names it.
  const RankGroup* from_rank_0 = nullptr;
  // What the names of a dict or of files become before they are looked up and reported, by one rule
  // after the other: {{"base.*", "*"}, {"*.attn.*", "*.self_attn.*"}}. A rule that fits no name,
  // and two names that become one, are a ContractError.
  std::vector<Rename> rename{};
};
struct LoadReport {
  std::vector<std::string> missing;     // names of the model that were not there, and are unchanged
  std::vector<std::string> unexpected;  // names that were there and the model does not have
};

}  // namespace tessera
