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
#include "tessera/detail/shard/layout.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/runtime_control.hpp"

namespace tessera::shard {

class HostLink;

// What a program decides about a unit's reductions; see shard/runtime_control.hpp.
struct ReductionPolicy {
  bool reduces = true, all_reduces = true;  // set_requires_gradient_sync, ..
  double divide_factor = 1;                 // of gradients, before they are summed
  AllReduceHook hook{};                     // behind the sums, empty for none,
  std::optional<StreamId> hook_stream{};    // where they run unless it says so
};

// The unit changes it; everybody else has it as const.
class UnitShards {
 public:
  UnitShards(std::vector<std::shared_ptr<ParameterState>> claimed, const ShardOptions& options);
  // Those of one slice of a parameter that `unit` streams: the same groups, of which it is a part.
  UnitShards(const UnitShards& unit, std::shared_ptr<ParameterState> slice);
  UnitShards(const UnitShards&) = delete;  // parameters point to its name
  UnitShards& operator=(const UnitShards&) = delete;

  // --- its parameters ---
  // Makes the flat groups: the shards.
  void materialize(const Device& on);
  bool is_materialized() const noexcept { return group_ != nullptr; }
  // Follows the parameters that have been frozen or thawed.
  void lay_out();
  // They go to another unit.
  void let_go() noexcept {
    parameters_.clear();
    streamed_.clear();
  }
  using Parameters = std::vector<std::shared_ptr<ParameterState>>;
  const Parameters& parameters() const noexcept { return parameters_; }  // without those that are
  const Parameters& streamed() const noexcept { return streamed_; }  // which come last in groups
  bool is_empty() const noexcept { return parameters_.empty() && streamed_.empty(); }
  bool is_slice() const noexcept { return is_slice_; }      // of a streamed parameter
  bool is_encoded() const noexcept { return is_encoded_; }  // one has a gather transform
  const Device& device() const noexcept { return device_; }
  // One of each dtype that values are stored in; what is trained is f32, and lies in the first.
  const std::vector<std::shared_ptr<FlatGroup>>& groups() const noexcept { return groups_; }
  const std::shared_ptr<FlatGroup>& group() const noexcept { return group_; }
  // Parameters of the group's trainable entries, from the first that is this unit's.
  const std::vector<std::size_t>& parameter_of() const noexcept { return parameter_of_; }
  int first_trainable() const noexcept { return first_trainable_; }
  const UnitLayout& layout() const noexcept { return layout_; }
  // Of parameter i: its entry, and how far into it this rank's chunk begins.
  const FlatEntry& entry_of(std::size_t i) const { return parameters_[i]->flat_entry(); }
  std::int64_t first_of(std::size_t i) const {
    return parameters_[i]->first_row * parameters_[i]->spec.row_numel();
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
  // Throws: ContractError where a parameter was thawed since the root's last call, which makes room
  // for its gradient.
  void expect_gradients() const;
  // How many elements a slice of a table may have where its gradient is to be no larger than a
  // piece.
  std::int64_t slice_numel() const;

  // --- its options, and what follows from them ---
  const ShardOptions& options() const noexcept { return options_; }
  void set_reshard_after_forward(Reshard when) { options_.reshard_after_forward = when; }
  void set_reductions_in_flight(int reductions) { options_.reductions_in_flight = reductions; }
  const ReductionPolicy& reductions() const noexcept { return reductions_; }
  ReductionPolicy& reductions() noexcept { return reductions_; }
  int size() const noexcept { return size_; }  // ranks that shard
  // Whose gradients are averaged.
  int ranks() const noexcept { return size_ * options_.mesh.replicas(); }
  DType param_dtype() const noexcept { return options_.precision.param.value_or(f32); }
  // What a parameter is gathered as, and computed in: what is frozen in another dtype than f32
  // stays as it is.
  DType gathered_as(const ParameterState& p) const noexcept {
    return p.dtype == f32 ? p.override_dtype.value_or(param_dtype()) : p.dtype;
  }
  // Of the gradient buffer. One rank has no wire: what it offloads comes as it was made.
  DType reduce_dtype() const noexcept {
    if (is_offloaded() && ranks() == 1) return f32;
    return options_.precision.reduce.value_or(f32);
  }
  // Whether shards, gradients and moments lie on the host.
  bool is_offloaded() const noexcept { return options_.offload == Offload::cpu; }
  // Whether the full tensors need a slot: not where one rank computes in the shards' own dtypes,
  // and where they lie.
  bool needs_slot() const noexcept { return needs_slot_; }
  std::int64_t gather_bytes() const noexcept { return needs_slot() ? layout_.gather_bytes : 0; }
  // Whether backward writes gradients to a buffer of the unit: not where it may write the shards'.
  bool has_buffer() const noexcept { return ranks() > 1 || is_offloaded(); }
  // Whether a parameter's gradient is a piece of its own, see ShardOptions::piece_bytes; whether
  // its chunks travel packed, with others of the kind.
  bool fills_piece(const ParameterState& p) const;
  bool is_small(const ParameterState& p) const;
  bool has_replicas() const noexcept { return has_replicas_; }
  // Whether those whose sums the gradients are have windows over symmetric memory.
  bool has_windows() const noexcept { return has_windows_; }
  // Whether backward reduces within each replica only, by set_requires_all_reduce.
  bool postpones_all_reduce() const noexcept { return has_replicas() && !reductions_.all_reduces; }

  // --- its root, and what units have of it in common ---
  // `root`: its number, see Root::take_number. `number`: of the units under it.
  void join_root(int root, std::string name, int number);
  int number() const noexcept { return number_; }
  bool is_root() const noexcept { return number_ == 0; }
  // `host`: null where nothing is offloaded.
  void share(Slots* slots, HostLink* host) noexcept {
    slots_ = slots;
    host_ = host;
  }
  Slots* slots() const noexcept { return slots_; }
  HostLink* host() const noexcept { return host_; }
  Slot take(SlotKind kind, std::int64_t bytes) const { return slots_->take(number_, kind, bytes); }
  // A failure is logged under the unit's name: this also runs where an exception is on its way.
  void give_back(const Slot& slot, bool ends_forward = false) const noexcept;
  void log_kept_slot(const std::exception& error) const noexcept;

  // --- names, which change where a root or a setter changes them ---
  const std::string& name() const noexcept {
    return name_;
  }  // before the root's first call of a parameter
  const char* gather_name() const noexcept { return gather_name_; }
  const char* reduce_name() const noexcept { return reduce_name_; }
  const char* all_reduce_name() const noexcept { return all_reduce_name_; }
  // What the program has decided, as peers are told; see Unit::name_decisions.
  const std::string& decisions() const noexcept { return decisions_; }
  void set_decisions(std::string decisions);
  // After a change of what they say: names collectives anew, and groups.
  void name_collectives();
  // What is reduced now was given outside of calls, and maybe on this rank alone.
  bool is_given_outside() const noexcept { return is_given_outside_; }
  void set_given_outside(bool is_given) noexcept { is_given_outside_ = is_given; }
  // What all ranks have come to at a gather, and at a reduction.
  void tell_progress_of_gather(CollectiveGroup& group) const {
    group.progress = at_gather();
    group.progress_at_replay = [this] { return at_gather(); };
  }
  void tell_progress_of_reduction(CollectiveGroup& group) const {
    group.progress = at_reduction();
    group.progress_at_replay = [this] { return at_reduction(); };
  }

 private:
  Progress at_gather() const;
  Progress at_reduction() const;
  ShardOptions options_;
  const int size_ = options_.mesh.shard_size();
  const bool has_replicas_ = options_.mesh.replicate_group() != nullptr;
  const bool has_windows_ =
      (has_replicas_ ? *options_.mesh.replicate_group() : options_.mesh.shard_group())
          .has_windows();
  ReductionPolicy reductions_;
  Parameters parameters_, streamed_;
  bool is_slice_ = false, is_encoded_ = false;
  bool needs_slot_ = size_ > 1 || param_dtype() != f32 || is_offloaded();
  UnitLayout layout_;
  Device device_ = Device::meta();
  std::vector<std::shared_ptr<FlatGroup>> groups_;
  std::shared_ptr<FlatGroup> group_;  // the first
  std::vector<std::size_t> parameter_of_;
  int first_trainable_ = 0;

  int root_ = 1, number_ = -1;
  Slots* slots_ = nullptr;
  HostLink* host_ = nullptr;

  std::string name_, decisions_;
  const char *gather_name_ = "", *reduce_name_ = "", *all_reduce_name_ = "";
  bool is_given_outside_ = false;
};

// A table of the device with three numbers a row, for the kernels of flat_arrays.hpp.
Tensor kernel_table(const std::vector<std::int64_t>& rows, const Device& device);

// Of one flat group, what is packed of this rank's chunks: the parameters that lie in `own`, are
// gathered in one dtype and have no gather transform.
struct ShardCopy {
  FlatGroup* group;
  UnitShards::ValueRange own;  // of its values
  DType dtype;                 // in the slot
  Tensor table;                // of kernels::PackEntry, which counts from value `first`
  std::int64_t numel;
};
// One for each dtype that has any.
std::vector<ShardCopy> shard_copies(const UnitShards& shards, FlatGroup& group,
                                    const UnitShards::ValueRange& own, std::int64_t first);

// Queues the copies of a table, `numel` elements in all, from `values` into a slot, where they are
// of `dtype`.
void pack(const char* name, Stream stream, const Tensor& table, std::int64_t numel,
          const Tensor& values, const Slot& slot, DType dtype);

}  // namespace tessera::shard
