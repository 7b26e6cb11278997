// Parameters: handles whose identity never changes, whether they are whole, sharded, or not yet in
// memory.
//
// A Parameter is always the shard: `shape()` is the global shape, `shard()` this rank's rows in the
// flat array of its unit, and inside its module's call it converts to the full tensor. Optimizers,
// clipping and initialisation see flat arrays only, one for each storage dtype of a unit.
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

// The slices of a streamed parameter, one of which is there at a time. The sharding engine makes
// them.
class ParameterSlices {
 public:
  virtual ~ParameterSlices() = default;
  virtual int count() const noexcept = 0;
  virtual SliceRows rows(int slice) const = 0;
  // Around the use of one; what throws has not opened it. `is_read`: whether backward reads it.
  virtual Tensor open(int slice, bool is_read) = 0;
  virtual void close(int slice) = 0;
  virtual void abandon(int slice) noexcept = 0;  // the use ended by an exception
  // Drops what backward has kept of their gradients without reducing it.
  virtual void drop_unreduced() noexcept = 0;
};

struct ParameterState;

// A handle; copies mean the same parameter.
class Parameter {
 public:
  Parameter() = default;  // undefined, as a bias that a layer does not have
  // On `meta` until its module is materialized.
  Parameter(const Shape& shape, Initializer initializer);

  bool defined() const noexcept { return state_ != nullptr; }
  // The global shape, sharded or not.
  const Shape& shape() const;
  const std::string& name() const;  // full, dotted, as its module tree has named it
  // Which rows of the whole this rank has.
  const ShardSpec& spec() const;
  // In which its values are kept: f32 of what is trained.
  DType dtype() const;
  // Stores a frozen parameter, as the base of adapters, in any floating dtype of at most 32 bits.
  // It is gathered as it is, and value() and shard() have this dtype. Call it before the parameter
  // has memory. Throws: ContractError for one that has memory, or is trainable, unless f32.
  void set_dtype(DType dtype) const;
  // How its unit gathers it; null, as at first: in the dtype of compute. Call it before the
  // parameter has memory; see param/gather_transform.hpp. Without a unit nothing is gathered.
  // Throws: ContractError for one that has memory, is stored in another dtype than f32 or sharded
  // by blocks of rows; for a transform without parts; what the transform throws for its shape.
  void set_gather_transform(std::shared_ptr<const GatherTransform> transform) const;
  // Its unit shards it raggedly, by blocks of so many rows that no rank cuts; see ShardSpec. 0, as
  // at first: evenly, as FSDP2 does. A unit goes on dealing blocks where its last such parameter
  // ended, so that ranks carry the same within one block. It is gathered and reduced by counts,
  // without padding. Call it before a unit claims the parameter. Throws: ContractError for one that
  // has a unit or a gather transform, and for fewer than 0 rows or more than it has. fully_shard
  // throws for a streamed one and with Reshard::to, since both keep even parts.
  void set_block_rows(std::int64_t rows) const;
  // Says that it stacks the rows of several tensors; see param/row_parts.hpp. At first it stacks
  // none. Call it before values are set. Throws: ContractError for parts that are not all its rows.
  void set_row_parts(std::vector<RowPart> parts) const;
  const std::vector<RowPart>& row_parts() const;
  // Over which ranks its unit shards it; null without one.
  std::shared_ptr<const DeviceMesh> mesh() const;
  // The name of its unit; null for none.
  const std::string* unit() const;
  // Where its values lie: meta before it is materialized.
  Device device() const;
  // The full tensor, with history recorded when trainable.  Throws: ContractError naming the unit
  // when it is closed, when the parameter has no memory yet, and of what is streamed, naming the
  // modules that stream it.
  operator Tensor() const { return value(); }
  Tensor value() const;
  // Calls f(slice [rows.count(), ...], rows) for each slice of a streamed parameter, by rising
  // rows.begin; else once with all of it, SliceRows::whole. Only modules may call it that have said
  // so by Module::stream_parameter. `is_read_in_backward`: see Module.
  //   Collective where the parameter is streamed, since each slice is gathered and reduced. A rank
  // that leaves it out fails the step of all ranks with a CommError, even where all call the
  // module. Slices are made by the first call of the root or of shard_plan. Throws: what f throws,
  // after which the step is over for the remaining slices too; ContractError as value() does, and
  // where f keeps the slice beyond its scope, other than saved for backward.
  template <class F>
  void for_each_slice(const F& f, bool is_read_in_backward = true) const;
  int slices() const;
  // As its unit decided; without one, as a unit would decide now. A table without rows never is.
  bool is_streamed() const;
  // This rank's rows of the values, to be read, and of the f32 gradient (undefined for none):
  // [rows, ...].
  // Throws: ContractError from shard() when the parameter has no memory yet, and from an operation
  // that writes to what it or value() gives.
  Tensor shard() const;
  Tensor grad() const;
  // The same with the global shape and the mesh of its unit; see
  // distributed/distributed_tensor.hpp. Throws: ContractError for a parameter of no unit, and as
  // shard().
  DistributedTensor distributed() const;
  DistributedTensor distributed_grad() const;
  // Calls f(rows), the shard for operations that write it; kept beyond f it is an error to use.
  // What they write comes after what still reads the old values, and the next call gathers it.
  // Every rank does it alike, and outside of the calls that use the parameter.
  // Throws: ContractError when the parameter has no memory yet, what f throws; and a backward
  // throws ContractError where its forward has read the old values.
  void edit(const std::function<void(const Tensor& rows)>& f) const;
  // The same: rows = values, of any floating dtype.
  // Throws: ContractError for another shape, dtype or device than that.
  void assign(const Tensor& values) const;

  // How nn::init sets it from now on.
  void set_initializer(Initializer how) const;
  // This rank's rows of the initial values that all ranks draw by `keys`: one, or one for each of
  // its row parts.
  void initialize(std::span<const std::uint64_t> keys) const;

  bool trainable() const;
  // A frozen parameter is gathered and never reduced. It has neither gradient nor moments, and the
  // optimizer leaves it alone. This may change between steps, on all ranks alike.
  //   A parameter that is frozen loses its gradient at once, also one that waits unreduced, and its
  // moments with the next step of an optimizer. One that is thawed begins with moments of 0 at the
  // count of steps that its optimizer has. Others keep gradient and moments.
  //   The next call of the root lays gradients out anew, and reduces what waits of others. Until
  // then a unit below it that is called by itself for training throws. Without a unit the next use
  // of a parameter beside it does this.
  //   Throws: ContractError inside of a unit's calls for training and of backward; for thawing what
  // is stored in another dtype than f32. That call of the root throws where a forward from before
  // has still to go backward.
  void set_trainable(bool trainable) const;
  void freeze() const { set_trainable(false); }

  // The same for all handles of a parameter.
  const void* id() const noexcept { return state_.get(); }
  bool operator==(const Parameter& other) const noexcept { return state_ == other.state_; }

 private:
  // For the layers that keep what a parameter is: runtime/param/parameter_state.hpp.
  friend const std::shared_ptr<ParameterState>& state_of(const Parameter& parameter);
  friend class nn::Module;  // which names it, and says who has it and who streams it
  void set_name(const std::string& name) const;
  void count_name(int by) const;
  bool is_tied() const;  // it has several names
  void count_module(int by) const;
  void add_streaming(const nn::Module& module) const;
  void remove_streaming(const nn::Module& module) const;
  void name_streaming(const nn::Module& module, const std::string& name) const;

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

// Gives parameters without a unit their memory: flat groups of some 16 MiB, so that a model that is
// sharded later shrinks by and by. Values are 0.
// Throws: ContractError when one of them has memory already.
void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device);

}  // namespace tessera
