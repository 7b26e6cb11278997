// Parameters: handles that stay the same whether the values are whole, sharded or not yet in
// memory.
//
// A Parameter is always the shard. `shape()` is the global shape, and `shard()` is this rank's rows
// in the flat array of its unit. Inside its module's call it converts to the full tensor.
// Optimizers, clipping and initialisation see only flat arrays, one for each storage dtype of a
// unit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/autograd/sliced.hpp"
#include "tessera/param/row_parts.hpp"
#include "tessera/param/shard_spec.hpp"
#include "tessera/tensor/initializer.hpp"

namespace tessera {

class DeviceMesh;
class DistributedTensor;
class GatherTransform;
namespace nn {
class Module;
}

// The slices of a streamed parameter. One slice is in memory at a time. The sharding engine makes
// them.
class ParameterSlices {
 public:
  virtual ~ParameterSlices() = default;
  virtual int count() const noexcept = 0;
  virtual SliceRows rows(int slice) const = 0;
  // open and close stand around the use of one slice. An open that throws has opened nothing.
  // `is_read`: whether backward reads the slice.
  virtual Tensor open(int slice, bool is_read) = 0;
  virtual void close(int slice) = 0;
  virtual void abandon(int slice) noexcept = 0;  // the use ended by an exception
  // Drops the slices' gradients that backward has kept and not reduced.
  virtual void drop_unreduced() noexcept = 0;
};

struct ParameterState;

// A handle; copies mean the same parameter.
class Parameter {
 public:
  Parameter() = default;  // undefined, for example the bias of a layer without one
  // On `meta` until its module is materialized.
  Parameter(const Shape& shape, Initializer initializer);

  bool defined() const noexcept { return state_ != nullptr; }
  // The global shape, sharded or not.
  const Shape& shape() const;
  const std::string& name() const;  // full, dotted, as its module tree has named it
  // Which rows of the whole tensor this rank has.
  const ShardSpec& spec() const;
  // The dtype that its values are stored in; f32 if it is trainable.
  DType dtype() const;
  // Stores a frozen parameter, for example the base of adapters, in a floating dtype of at most 32
  // bits. It is gathered as it is, and value() and shard() have this dtype. Call it before the
  // parameter has memory. Throws: ContractError for a parameter that has memory; for another dtype
  // than f32 if it is trainable or has a gather transform.
  void set_dtype(DType dtype) const;
  // Sets how its unit gathers it. Null, as at first: in the dtype of compute. Call it before the
  // parameter has memory; see param/gather_transform.hpp. Without a unit nothing is gathered.
  // Throws: ContractError for a parameter that has memory, is stored in another dtype than f32, or
  // is sharded by blocks of rows or along another dimension than 0; for a transform without parts;
  // what the transform throws for its shape.
  void set_gather_transform(std::shared_ptr<const GatherTransform> transform) const;
  // Has its unit shard it raggedly: by blocks of this many rows, which no rank cuts; see ShardSpec.
  // 0, as at first: evenly, as FSDP2 does. Blocks are dealt on from where the unit's last such
  // parameter ended, so that ranks carry the same within one block. The parameter is gathered and
  // reduced by counts, without padding. Call it before a unit claims the parameter. Throws:
  // ContractError for one that has a unit or a gather transform, and for fewer than 0 rows or more
  // than it has. fully_shard throws for a streamed one and with Reshard::to, since both keep even
  // parts.
  void set_block_rows(std::int64_t rows) const;
  // Says that it stacks the rows of several tensors; see param/row_parts.hpp. At first it stacks
  // none. Call it before values are set. Throws: ContractError for parts that do not add up to all
  // its rows, and for a part without a name or rows.
  void set_row_parts(std::vector<RowPart> parts) const;
  const std::vector<RowPart>& row_parts() const;
  // The mesh over which its unit shards it; null without a unit.
  std::shared_ptr<const DeviceMesh> mesh() const;
  // The name of its unit; null without one.
  const std::string* unit() const;
  // The device of its values; meta before it is materialized.
  Device device() const;
  // The full tensor, in the global shape; operations on it record history if it is trainable.
  //   Throws: ContractError that names the unit if the unit is closed; for a parameter without
  // memory; for a streamed one, naming the modules that stream it.
  operator Tensor() const { return value(); }
  Tensor value() const;
  // Calls f(slice [rows.count(), ...], rows) for each slice of a streamed parameter, by rising
  // rows.begin. A parameter that is not streamed is one slice, SliceRows::whole. A module that
  // calls it has said so by Module::stream_parameter. `is_read_in_backward`: see
  // Module::reads_parameters_in_backward.
  //   Collective for a streamed parameter, since each slice is gathered and reduced. A rank that
  // leaves it out fails the step of all ranks with a CommError, even if all call the module. Slices
  // are made by the first call of the root or of shard_plan.
  //   Throws: what f throws, after which the step is over for the remaining slices, too.
  // ContractError as value() does, and if f keeps the slice beyond its scope, other than saved for
  // backward.
  template <class F>
  void for_each_slice(const F& f, bool is_read_in_backward = true) const;
  int slices() const;
  // Whether its unit streams it; without a unit, whether a unit would now. A table without rows is
  // never streamed.
  bool is_streamed() const;
  // Whether several modules have registered it, as those of tied weights do.
  bool is_shared() const;
  // This rank's rows, [rows, ...], to be read: of the values, and of the f32 gradient, which is
  // undefined if there is none.
  //   Throws: ContractError from shard() for a parameter without memory, and from an operation that
  // writes to what shard() or value() gives.
  Tensor shard() const;
  Tensor grad() const;
  // The same rows with the global shape and the mesh of the unit; see
  // distributed/distributed_tensor.hpp. Throws: ContractError for a parameter of no unit, and as
  // shard().
  DistributedTensor distributed() const;
  DistributedTensor distributed_grad() const;
  // Calls f(rows), with the shard, [rows, ...], for operations that write it. What they write comes
  // after everything that still reads the old values, and the next call gathers it. Every rank does
  // it alike, and outside of the calls that use the parameter.
  //   Throws: what f throws; ContractError for a parameter without memory, and if `rows` is used
  // after f. A backward whose forward has read the old values throws ContractError, too.
  void edit(const std::function<void(const Tensor& rows)>& f) const;
  // Edits so: rows = values, [rows, ...] of any floating dtype, on the parameter's device. Throws:
  // ContractError for another shape, dtype or device.
  void assign(const Tensor& values) const;

  // Sets how nn::init fills it from now on.
  void set_initializer(Initializer how) const;
  // Fills this rank's rows with the initial values that `keys` stand for, the same on all ranks.
  // There is one key, or one for each row part.
  void initialize(std::span<const std::uint64_t> keys) const;
  // The same for codes in e4m3: what is drawn in f32 becomes codes here, and a scale for each row
  // in `scales` [n, 1, ...]; see encode_rows of autograd/rows_in_8_bits.hpp.
  void initialize(std::span<const std::uint64_t> keys, const Parameter& scales) const;

  bool trainable() const;
  // A frozen parameter is gathered and never reduced. It has neither gradient nor moments, and the
  // optimizer leaves it alone. This may change between steps, on all ranks alike.
  //   Freezing drops the gradient at once, also one that waits unreduced. It drops the moments at
  // the next step of an optimizer, so a parameter that is thawed before keeps them. One that is
  // thawed later begins with moments of 0 at the count of steps that its optimizer has. A state
  // dict or a checkpoint has no moments of what is frozen. Other parameters keep gradient and
  // moments.
  //   The next call of the root lays gradients out anew, and reduces what waits of other
  // parameters. Until then a call for training of a unit below it throws. Without a unit the next
  // use of a parameter in the same flat group does this.
  //   Throws: ContractError inside of a unit's calls for training and of backward; for thawing what
  // is stored in another dtype than f32. The next call of the root throws if a forward from before
  // has still to go backward.
  void set_trainable(bool trainable) const;
  void freeze() const { set_trainable(false); }

  // Equal for all handles of one parameter.
  const void* id() const noexcept { return state_.get(); }
  bool operator==(const Parameter& other) const noexcept { return state_ == other.state_; }

 private:
  // For layers that read what a parameter keeps: runtime/param/parameter_state.hpp.
  friend const std::shared_ptr<ParameterState>& state_of(const Parameter& parameter);
  friend class nn::Module;  // which names it, and says who has it and who streams it
  void set_name(const std::string& name) const;
  void count_name(int by) const;
  bool is_tied() const;  // it has several names
  void count_module(int by) const;
  void add_streaming(const nn::Module& module) const;
  void remove_streaming(const nn::Module& module) const;
  void name_streaming(const nn::Module& module, const std::string& name) const;

  // Fills `out` with initial values of the rows `of`.
  void draw(const Tensor& out, const RowRange& of, std::span<const std::uint64_t> keys) const;
  std::shared_ptr<ParameterSlices> made_slices() const;  // null: it is there as a whole

  std::shared_ptr<ParameterState> state_;
};

template <class F>
void Parameter::for_each_slice(const F& f, bool is_read_in_backward) const {
  const std::shared_ptr<ParameterSlices> slices = made_slices();
  if (!slices) return f(value(), SliceRows::whole(shape()[0]));
  for (int i = 0; i < slices->count(); ++i) {
    struct Use {
      ParameterSlices& of;
      int slice;
      bool has_ended = false;
      ~Use() {
        if (!has_ended) of.abandon(slice);
      }
    };
    Tensor slice = slices->open(i, is_read_in_backward);
    Use use{*slices, i};
    f(std::as_const(slice), slices->rows(i));
    slice = {};
    use.has_ended = true;
    slices->close(i);
  }
}

using NamedParameters = std::vector<std::pair<std::string, Parameter>>;

// Gives parameters without a unit their memory, with values of 0. They lie in flat groups of about
// 16 MiB, so that a model that is sharded later frees its memory group by group.
//   Throws: ContractError if one of them has memory already.
void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device);

}  // namespace tessera
