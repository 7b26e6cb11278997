// The flat arrays of one rank's shards of a unit: what optimizers, clipping and scalers work on.
// What is trained lies in f32; frozen parameters that are stored in other dtypes have a group of
// each of these. Plain structs; the sharding engine fills them.
//
//   FlatGroup of a unit, f32       │ wq: 12 rows │ wk: 6 rows, frozen │ norm: 32 │
//     values                       ├─────────────┼────────────────────┼──────────┤
//     gradient (undefined = none)  ├─────────────┼──────────┼ arrival counts ┤
//
// Each entry begins at a multiple of 256 bytes. PyTorch FSDP2 keeps a list of tensors in its place
// (FSDPParamGroup.fsdp_params), and its optimizers one state for each.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/detail/base/checked.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

class Communicator;
struct ParameterState;
struct UpdateLog;

// One parameter's part of a flat group, in elements.
struct FlatEntry {
  std::int64_t offset = 0;  // a multiple of 256 bytes
  std::int64_t numel = 0;   // this rank's rows
  std::int64_t chunk = 0;   // every rank's rows, padding included
  std::weak_ptr<ParameterState> parameter{};
  int trainable = -1;                // which of the trainable entries; -1: it is frozen
  std::int64_t gradient_offset = 0;  // of a trainable one, in the gradient
};

inline constexpr std::int64_t kFlatAlign = kAlignmentBytes / 4;  // elements of f32

struct FlatGroup {
  std::string name;
  Device device = Device::meta();  // where the arrays lie: of a unit that is offloaded the host
  std::vector<FlatEntry> entries;
  std::int64_t numel = 0;           // of `values`, padding included
  Tensor values;                    // [numel]; padding is 0
  std::vector<int> trainable;       // the entries that have a gradient, in order
  std::int64_t gradient_numel = 0;  // of theirs, padding included
  std::uint64_t layouts = 0;        // counts changes of them, and of the parameters' group
  bool is_laid_out = true;          // false: a parameter was frozen or thawed since
  // [gradient_numel + counts_numel()], or undefined when there is none: the trainable entries as
  // they lie in `values`, without gaps for the frozen ones. Padding is 0. The tail holds an arrival
  // count for each: where it is 0 no rank had a gradient, and the parameter is skipped by whoever
  // reads it, on the device.
  Tensor gradient;
  std::uint64_t gradients = 0;  // counts those that reductions have made
  // What clipping has left `gradient` to be multiplied by, f32 []: an optimizer does it on its way;
  // before whoever else looks at it, or adds to it, apply_factor has. Undefined: 1.
  Tensor factor;
  // Of which trainable entries backward has kept gradients without reducing them, which `gradient`
  // lacks; empty for none. Equal on every rank.
  std::vector<bool> unreduced;
  Event reduced;              // after which `gradient` may be read; set by whoever reduces it
  Event updated;              // after which `values` may be read; set by whoever writes them
  Event edited;               // the same, where it was no optimizer: a failed step may have lost it
  std::uint64_t version = 0;  // counts writes of `values`
  // False when an update was left half done, or when ranks are at different updates: `values` and
  // what an optimizer keeps for them are to be loaded. See ShardReset.
  bool is_consistent = true;
  // Of the optimizers that write `values`, by the first entry that each has: in one order on all
  // ranks.
  std::multimap<int, std::shared_ptr<UpdateLog>> updates;
  // For sums over the ranks that hold the other shards, and for agreement with those that hold the
  // same; each null for one rank.
  std::shared_ptr<Communicator> sums, replicas;

  std::int64_t counts_numel() const {
    return round_up(static_cast<std::int64_t>(trainable.size()), kFlatAlign);
  }
  // [counts_numel()] of a defined gradient.
  Tensor counts() const { return gradient.view({counts_numel()}, {1}, gradient_numel); }
  // Entry of the i-th that is trainable.
  const FlatEntry& trained(std::size_t i) const {
    return entries[static_cast<std::size_t>(trainable[i])];
  }
  // The gradient, for work on the device's compute stream (of a host's side `offload`) from here
  // on. Waiting here and not at the end of backward lets the next micro-batch compute beside the
  // reductions of the last.
  const Tensor& await_gradient() {
    await_reduced();
    apply_factor();
    return gradient;
  }
  // Waits, and leaves `factor` to who multiplies by it himself or reads the counts alone.
  void await_reduced() const {
    if (reduced.tick > 0) device.compute().wait(reduced);
  }
  // gradient *= factor, in a pass of its own on that stream, where that is left to do.
  void apply_factor();
  void drop_gradient() noexcept {
    note_gradient();
    gradient = factor = {};
  }
  // Before `gradient` or `factor` comes or goes: a captured step is of one state of them.
  void note_gradient() noexcept;
  // What writes `values` on the compute stream comes after what still reads them: gathers, or of a
  // host's shards the copies to the device.
  void await_readers() const {
    device.compute().wait(
        device.stream(device.is_host() ? StreamId::transfer : StreamId::gather).record());
  }
  // To be called after `values` were written on that stream, by an optimizer or by whom else.
  void mark_updated() {
    if (!device.is_meta()) updated = device.compute().record();
    ++version;
    is_consistent = true;
  }
  void mark_edited() {
    mark_updated();
    edited = updated;
  }
  // The sum of the numbers of the last steps of `updates`, as UpdateLog::told: on all ranks alike.
  std::uint64_t steps() const noexcept;
  // A hash of these numbers, which tells apart whose they are; of one optimizer its number.
  std::uint64_t steps_of_each() const noexcept;
  // Of the trainable entries from first to before end.
  void set_unreduced(std::size_t first, std::size_t end, bool is_unreduced);
  // Throws: ContractError naming `function`, the unit and the remedy where one of them is.
  void expect_reduced(const char* function, std::size_t first, std::size_t end) const;
  // Lays out the gradient of those parameters that are trainable now; what is there of it stays,
  // and those that come have none.
  void lay_out_gradient();
  // Lays out the entries of `parameters`, all of one dtype, by their specs and allocates `values`,
  // which are 0.
  static std::shared_ptr<FlatGroup> make(
      std::string name, const std::vector<std::shared_ptr<ParameterState>>& parameters,
      const Device& device);
};

}  // namespace tessera
