// What a unit keeps on this rank for good: the parameters that it has claimed, their shards, and
// the arithmetic of where bytes lie. The two other parts of a unit read it, and come and
// go with each call:
//
//   UnitShards ──gather──▶ GatheredParameters   full parameters, while the unit is open
//              ◀──reduce── GradientBuffer       full gradients, of one pass of backward
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/param/parameter_state.hpp"
#include "runtime/shard/slots.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/layout.hpp"
#include "tessera/shard/runtime_control.hpp"

namespace tessera::shard {

class HostLink;
class Replicas;

struct UnitShards {
  UnitShards(std::vector<std::shared_ptr<ParameterState>> claimed, const ShardOptions& options);
  // Those of one slice of a parameter that `unit` streams: the same groups, of which it is a part.
  UnitShards(const UnitShards& unit, std::shared_ptr<ParameterState> slice);
  UnitShards(const UnitShards&) = delete;  // parameters point to its name
  UnitShards& operator=(const UnitShards&) = delete;

  // Makes the flat group: the shards.
  void materialize(const Device& on);
  bool is_materialized() const noexcept { return group != nullptr; }
  // Follows the parameters that have been frozen or thawed.
  void lay_out();
  bool is_empty() const noexcept { return parameters.empty() && streamed.empty(); }
  bool is_root() const noexcept { return number == 0; }
  // Of parameter i: its entry, and how far into it this rank's chunk begins.
  const FlatEntry& entry_of(std::size_t i) const { return parameters[i]->flat_entry(); }
  std::int64_t first_of(std::size_t i) const {
    return parameters[i]->first_row * parameters[i]->spec.row_numel();
  }
  // Where it lies in the group's values, and in its gradient.
  std::int64_t offset_of(std::size_t i) const { return entry_of(i).offset + first_of(i); }
  std::int64_t gradient_offset_of(std::size_t i) const {
    return entry_of(i).gradient_offset + first_of(i);
  }
  // Of a group's values those of `parameters`, which follow one another; of a slice its rows.
  // Elements.
  struct ValueRange {
    std::int64_t begin = 0, end = 0;
    std::int64_t numel() const { return end - begin; }
  };
  ValueRange values(const FlatGroup& of) const;
  // Names the unit, and with it group and collectives.
  void set_name(std::string to);

  DType param_dtype() const noexcept { return options.precision.param.value_or(f32); }
  // What values of `stored` are gathered as, and computed in: what is frozen in another dtype than
  // f32 stays as it is.
  DType gathered_as(DType stored) const noexcept { return stored == f32 ? param_dtype() : stored; }
  // Of the gradient buffer. One rank has no wire: what it offloads comes as it was made.
  DType reduce_dtype() const noexcept {
    if (is_offloaded() && ranks() == 1) return f32;
    return options.precision.reduce.value_or(f32);
  }
  // Of the ranks whose gradients are averaged.
  int ranks() const noexcept { return size * options.mesh.replicas(); }
  // Whether shards, gradients and moments lie on the host.
  bool is_offloaded() const noexcept { return options.offload == Offload::cpu; }
  // Whether the full tensors need a slot: not where one rank computes in the shards' own dtype, and
  // where they lie.
  bool needs_slot() const noexcept {
    return size > 1 || param_dtype() != f32 || is_offloaded() || is_encoded;
  }
  // Whether backward writes gradients to a buffer of the unit: not where it may write the shards'.
  bool has_buffer() const noexcept { return ranks() > 1 || is_offloaded(); }
  // Whether a parameter's gradient is a piece of its own, see ShardOptions::piece_bytes; whether
  // its chunks travel packed, with others of the kind.
  bool fills_piece(const ParameterState& p) const;
  bool is_small(const ParameterState& p) const;

  // Whether backward reduces within each replica only, by set_requires_all_reduce.
  bool postpones_all_reduce() const noexcept { return replicas && !all_reduces; }
  std::int64_t gather_bytes() const noexcept { return needs_slot() ? layout.gather_bytes : 0; }
  // Throws: ContractError where a parameter was thawed since the root's last call, which makes room
  // for its gradient.
  void expect_gradients() const;
  // What a slice of a table may have where the gradient of it is to be no larger than a piece.
  std::int64_t slice_bytes() const;

  // What all ranks have come to at a gather, and at a reduction.
  Progress at_gather() const;
  Progress at_reduction() const;
  Slot take(SlotKind kind, std::int64_t bytes) const { return slots->take(number, kind, bytes); }
  // A failure is logged under the unit's name: this also runs where an exception is on its way.
  void give_back(const Slot& slot, bool ends_forward = false) const noexcept;
  void log_kept_slot(const std::exception& error) const noexcept;

  ShardOptions options;
  const int size = options.mesh.shard_size();
  std::string decisions;                    // of the program, see UnitControl
  std::string name;                         // until the root's first call: of a parameter
  int root = 1;                             // its number, see Context::take_number
  int number = -1;                          // of the units under its root, which have
  Slots* slots = nullptr;                   // in common
  Replicas* replicas = nullptr;             // likewise; null without any,
  HostLink* host = nullptr;                 // and where nothing is offloaded
  bool is_slice = false;                    // of a streamed parameter
  bool is_encoded = false;                  // a parameter has a gather transform
  bool reduces = true, all_reduces = true;  // by set_requires_gradient_sync, ..
  double divide_factor;                     // of gradients, before they are summed
  AllReduceHook hook;                       // behind the sums, empty for none,
  std::optional<StreamId> hook_stream;      // where they run unless it says so
  const char *gather_name = "", *reduce_name = "", *all_reduce_name = "";  // of its collectives
  std::vector<std::shared_ptr<ParameterState>> parameters;  // without those that are streamed
  std::vector<std::shared_ptr<ParameterState>> streamed;    // which come last in their groups
  UnitLayout layout;
  Device device = Device::meta();
  // One of each dtype that values are stored in; what is trained is f32, and lies in the first.
  std::vector<std::shared_ptr<FlatGroup>> groups;
  std::shared_ptr<FlatGroup> group;       // the first
  std::vector<std::size_t> parameter_of;  // of the group's trainable entries, from the first
  int first_trainable = 0;                // of these, that is this unit's
};

// A table of the device with three numbers a row, for the kernels of flat.hpp.
Tensor table_of(const std::vector<std::int64_t>& rows, const Device& device);

// Throws: ContractError for what a unit cannot be made of; `of` says which.
void check_options(const ShardOptions& options, const std::string& of);
// By which dimension they shard a parameter. Throws: likewise, where it can't be.
int dim_of(const Parameter& parameter, const ShardOptions& options, const std::string& of);

// Queues the copies of a table, `numel` elements in all, from `values` into a slot, where they are
// of `dtype`.
void pack(const char* name, Stream stream, const Tensor& table, std::int64_t numel,
          const Tensor& values, const Slot& slot, DType dtype);

}  // namespace tessera::shard
