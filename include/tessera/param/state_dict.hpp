// State by name: tensors, each with the part of a whole that it is. Modules and optimizers give and
// take such dicts; see nn/state.hpp and Optimizer::state_dict.
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

// The rows of `spec` of one parameter, buffer or moment.
struct StateTensor {
  StateTensor() = default;
  StateTensor(Tensor whole) : values(std::move(whole)), spec{values.shape(), 1, 0} {}
  StateTensor(Tensor rows, const ShardSpec& of, std::shared_ptr<const DeviceMesh> over = {},
              std::uint64_t updates = 0)
      : values(std::move(rows)), spec(of), mesh(std::move(over)), steps(updates) {}

  Tensor values;                             // [rows, ...]; a scalar is [] on every rank
  ShardSpec spec;                            // global shape, rank, number of ranks
  std::shared_ptr<const DeviceMesh> mesh{};  // of these ranks, one dimension; null: unknown
  std::uint64_t steps = 0;  // updates by optimizers; ranks compare them before it is gathered
};
using StateDict = std::map<std::string, StateTensor, std::less<>>;

// What a state dict holds of sharded tensors.
enum class StateForm : std::uint8_t {
  sharded,  // this rank's rows, copied; no communication
  view,     // this rank's rows as they lie, to be read before the next update. A load into the same
            // model under other names updates them, too, and reads what it has just written
  full,     // whole tensors, copied; collective over each mesh
};
// Who gets whole tensors. With rank_0 it is the first rank of the units' mesh, and so the first of
// each stage of a pipeline. The other ranks take part and get an empty dict. Then a parameter in no
// unit (ShardOptions::ignored) that differs between ranks of that mesh is a ContractError, because
// the dict would have the first one's value alone.
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

// Each name that fits `pattern` as a whole becomes `replacement`. A * stands for any text, also
// dots or nothing. The first * of `replacement` stands for the text of the first * of `pattern`,
// and so on. Where a pattern fits in several ways, the first * take as little text as they can.
struct Rename {
  std::string pattern, replacement;
};
struct LoadOptions {
  // Whether a missing or unexpected name is an error. A tensor of another shape or kind always is
  // one.
  bool strict = true;
  // Null: each rank loads what it gives. Otherwise only rank 0 of this group has whole tensors, and
  // sends them one at a time (PyTorch: broadcast_from_rank0). What other ranks give is ignored.
  // Collective over the group, in which every rank has a model of the same names and shapes. A
  // model on meta is materialized on the group's device first. A parameter in no unit that differs
  // between ranks is not overwritten: a ContractError names it.
  const RankGroup* from_rank_0 = nullptr;
  // Rules that rename what a dict or files have, before names are looked up and reported:
  // {{"base.*", "*"}, {"*.attn.*", "*.self_attn.*"}}. They apply one after the other. A rule that
  // fits no name, and two names that become one, are a ContractError.
  std::vector<Rename> rename{};
};
struct LoadReport {
  std::vector<std::string> missing;     // the model's names that the source lacks: unchanged
  std::vector<std::string> unexpected;  // the source's names that the model lacks
};

}  // namespace tessera
