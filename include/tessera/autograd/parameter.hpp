// Parameters: handles whose identity never changes, whether they are whole, sharded, or not yet in
// memory.
//
// A Parameter is always the shard: `shape()` is the global shape, `shard()` this rank's rows in the
// flat array of its unit, and inside its module's call it converts to the full tensor. Optimizers,
// clipping and initialisation see flat groups only.
//
//   FlatGroup of a unit, f32       │ wq: 12 rows │ wk: 6 rows │ norm: 32 │
//     values                       ├─────────────┼────────────┼──────────┤
//     gradient (undefined = none)  ├─────────────┼────────────┼──────────┼ arrival counts ┤
//
// Each entry begins at a multiple of 256 bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/shard_spec.hpp"

namespace tessera {

class Communicator;
struct ParameterState;

// How a parameter starts. Values depend on (seed, name, global index) only, so they are the same
// for any number of ranks.
struct Initializer {
  enum class Kind : std::uint8_t { constant, normal } kind = Kind::constant;
  double mean = 0;       // or the constant
  double deviation = 0;  // of normal
  static Initializer constant(double value) { return {Kind::constant, value, 0}; }
  static Initializer normal(double mean, double deviation) {
    return {Kind::normal, mean, deviation};
  }
};

// One parameter's part of a flat group, in elements.
struct FlatEntry {
  std::int64_t offset = 0;  // a multiple of 64: 256 bytes
  std::int64_t numel = 0;   // this rank's rows
  std::int64_t chunk = 0;   // every rank's rows, padding included
  std::weak_ptr<ParameterState> parameter;
};

inline constexpr std::int64_t kFlatAlign = kAlignmentBytes / 4;  // elements of f32

// The updates that one optimizer has submitted, shared with its groups so that a reset can tell
// which have run. A plain record.
struct UpdateLog {
  struct Update {
    Tick first = 0, last = 0;  // of its launches that write values, on the compute stream
    bool is_cut = false;       // by an exception on the host: no step
  };
  std::int64_t steps = 0;        // submitted, without those that never began
  std::vector<Update> queued{};  // of them, those that the host does not know to have run
  Tick prepared = 0;  // the last launch that made the optimizer's state; 0: none is there
};

// The flat f32 arrays of one rank's shards of a unit: what optimizers, clipping and scalers work
// on. A plain record.
struct FlatGroup {
  std::string name;
  Device device = Device::meta();
  std::vector<FlatEntry> entries;
  std::int64_t numel = 0;  // of `values`, padding included
  Tensor values;           // [numel]; padding is 0
  // [numel + counts_numel()], or undefined when there is none. Padding is 0. The tail holds an
  // arrival count per entry: where it is 0 no rank had a gradient, and the parameter is skipped by
  // whoever reads it, on the device.
  Tensor gradient;
  Event reduced;              // after which `gradient` may be read; set by whoever reduces it
  Event updated;              // after which `values` may be read; set by whoever writes them
  std::uint64_t version = 0;  // counts writes of `values`
  // False when an update was left half done, or when ranks are at different updates: `values` and
  // what an optimizer keeps for them are to be loaded. See ShardReset.
  bool whole = true;
  bool trainable = true;  // of all its parameters: frozen ones lie in a group of their own
  std::vector<std::shared_ptr<UpdateLog>> updates;  // of the optimizers that write `values`
  // For sums over the ranks that hold the other shards; null for one rank.
  Communicator* sums = nullptr;

  std::int64_t counts_numel() const {
    return round_up(static_cast<std::int64_t>(entries.size()), kFlatAlign);
  }
  // [counts_numel()] of a defined gradient.
  Tensor counts() const { return gradient.view({counts_numel()}, {1}, numel); }
  // The gradient, for work on the compute stream from here on. Waiting here and not at the end of
  // backward lets the next micro-batch compute beside the reductions of the last.
  const Tensor& await_gradient() const {
    if (reduced.tick > 0) device.compute().wait(reduced);
    return gradient;
  }
  // To be called after `values` were written on the compute stream.
  void mark_updated() {
    if (!device.is_meta()) updated = device.compute().record();
    ++version;
    whole = true;
  }
  // Lays out the entries of `parameters` by their specs and allocates `values`, uninitialised but
  // for the padding.
  static std::shared_ptr<FlatGroup> make(
      std::string name, const std::vector<std::shared_ptr<ParameterState>>& parameters,
      const Device& device);
};

// Where the gradients of a group's parameters are written during backward: a unit's run, or the
// group's own gradient.
class GradientPlace {
 public:
  virtual ~GradientPlace() = default;
  virtual autograd::Leaf::Target take(int entry) = 0;
};

// The place of a group that no peer shares: gradients go straight into FlatGroup::gradient.
class LocalGradient final : public GradientPlace {
 public:
  explicit LocalGradient(FlatGroup& group);
  autograd::Leaf::Target take(int entry) override;
  // Completes what arrived since the last call: missing gradients of a fresh array become zeros,
  // counts are written.
  void complete();
  // After a pass that ended with an exception: drops the gradient if the pass had begun to write
  // it.
  void abandon() noexcept;
  // When set, `complete` and `abandon` are left to the caller; otherwise one of them runs at the
  // end of each backward pass.
  bool completed_by_caller = false;

 private:
  FlatGroup& group_;
  Tensor places_;  // table of kernels::PlaceEntry
  std::vector<std::uint64_t> arrived_;
  std::vector<bool> held_;  // entries that hold a value in the current array
  bool fresh_ = false;
  bool scheduled_ = false;
};

struct ParameterState {
  std::string name;  // full, dotted; set by the module tree
  Shape shape;
  Initializer initializer;
  bool trainable = true;
  ShardSpec spec;                    // the whole parameter until a unit claims it
  std::shared_ptr<FlatGroup> group;  // null before it is materialized
  int entry = -1;                    // in the group
  DType compute_dtype = DType::f32;  // of the full tensor
  std::shared_ptr<Storage> window;   // of the full tensor; see Note [Windows]
  std::int64_t window_offset_bytes = 0;
  const Event* ready = nullptr;  // compute waits for it before value(); null where it has
  std::shared_ptr<autograd::Leaf> leaf;
  std::shared_ptr<GradientPlace> place;
  const std::string* unit = nullptr;  // the name of the unit that claimed it
};

// A handle; copies mean the same parameter.
class Parameter {
 public:
  Parameter() = default;  // undefined, as a bias that a layer does not have
  // On `meta` until its module is materialized.
  Parameter(const Shape& shape, Initializer initializer);

  bool defined() const noexcept { return state_ != nullptr; }
  // The global shape, sharded or not.
  const Shape& shape() const { return state_->shape; }
  const std::string& name() const { return state_->name; }
  // The full tensor, with history recorded when trainable.  Throws: ContractError naming the unit
  // when it is closed, and when the parameter has no memory yet.
  operator Tensor() const { return value(); }
  Tensor value() const;
  // This rank's rows of the f32 values, and of the gradient (undefined for none): [rows, ...].
  // Throws: ContractError from shard() when the parameter has no memory yet.
  Tensor shard() const;
  Tensor grad() const;

  bool trainable() const { return state_->trainable; }
  // Frozen parameters are gathered, never reduced, and the optimizer leaves them alone. Set before
  // sharding.
  void freeze() { state_->trainable = false; }

  const std::shared_ptr<ParameterState>& state() const noexcept { return state_; }
  bool operator==(const Parameter& other) const noexcept { return state_ == other.state_; }

 private:
  std::shared_ptr<ParameterState> state_;
};

// Gives parameters without a unit their memory: a flat group, and another for the frozen ones.
// Values are 0.  Throws: ContractError when one of them has memory already.
void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device);

// The distinct groups of `parameters`, in order of first mention.
// Throws: ContractError when one is not materialized.
std::vector<std::shared_ptr<FlatGroup>> groups_of(const std::vector<Parameter>& parameters);

}  // namespace tessera
