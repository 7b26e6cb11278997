// fully_shard: per-parameter sharding with the semantics of PyTorch's FSDP2.
//
//   for (auto& block : model.blocks) fully_shard(block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});                       // claims what the blocks did not
//
// Each call makes a unit: the parameters below the module that no inner call has claimed. Each rank
// keeps its rows of each; a call of the module gathers the rest, and its end frees them again, so
// backward gathers once more. What is called last stays gathered through the turn from forward to
// backward. One step of two blocks on three streams:
//
//   gather   │ g0 │ g1 │ g0 │                            each as soon as its slot is free
//   compute       │ f0 │ f1 │ loss │ b1     │ b0     │    │ optimizer
//   reduce                                  │ r1     │ r0 │
//
// Every rank calls the same units in the same order, whatever it then does with their results. What
// only some ranks call, as an expert of their own, stays in a unit that all of them call, and isn't
// streamed: each slice is a unit.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// Whether a unit frees its full parameters after forward and gathers them again in backward.
class Reshard {
 public:
  static const Reshard always, never;
  // As `always`, except for those that backward needs at once: the outermost unit's, and those of a
  // call that backward comes to before any other slot is taken, as the last block's.
  static const Reshard automatic;
  // From forward to backward each rank keeps the k-th part of the full parameters, and backward
  // gathers them from k neighbours, which are on one machine if any ranks are (ZeRO++: hpZ).
  // `ranks` divides those that shard, and is neither 1 nor all; of a mesh of all ranks.
  static constexpr Reshard to(int ranks) noexcept { return {Kind::to, ranks}; }

  bool operator==(const Reshard&) const = default;
  constexpr bool is_partial() const noexcept { return kind_ == Kind::to; }
  constexpr int ranks() const noexcept { return ranks_; }  // of `to`
  // "always", "to(8)"
  std::string to_string() const;
  friend std::ostream& operator<<(std::ostream& out, Reshard reshard) {
    return out << reshard.to_string();
  }

 private:
  enum class Kind : std::uint8_t { automatic, always, never, to };
  constexpr Reshard(Kind kind, int ranks = 0) noexcept : kind_(kind), ranks_(ranks) {}

  Kind kind_;
  int ranks_;
};
inline constexpr Reshard Reshard::automatic{Kind::automatic}, Reshard::always{Kind::always},
    Reshard::never{Kind::never};

// f32, bf16 or f16 (PyTorch: MixedPrecisionPolicy).
struct MixedPrecision {
  // Of the full parameters and so of compute, of those that are stored in f32; unset: f32. What
  // Parameter::set_dtype stores otherwise is gathered as it is.
  std::optional<DType> param{};
  // Of gradients on the wire: f32 or `param`; unset: f32.
  std::optional<DType> reduce{};
  // Of floating tensors that a call of the module gives; unset: as they are. Both of these know the
  // tensors that hooks do, see nn::Module::call.
  std::optional<DType> output{};
  // Whether floating tensors that go into a call become `param`, where it is set.
  bool cast_forward_inputs = true;
};

// Where a unit's shards lie with their gradients and the optimizer's moments, and where the step is
// computed (PyTorch: CPUOffloadPolicy, always pinned).
//
//   none   on the device
//   cpu    on the host beside it (Device::host): a gather casts there and brings a unit's shard to
//          the device in one copy, a reduction takes a piece's sums back in one. Parameter::shard
//          and grad, state dicts and clip_grad_norm's norm are tensors of the host, whose
//          operations run on the stream `offload`. The device keeps slots, activations and a
//          staging of twice the largest shard and twice the largest piece's. A CPU has both
//          memories too, so that a plan of either is a plan of both.
enum class Offload : std::uint8_t { none, cpu };

struct ShardOptions {
  // One dimension shards. Of two the first replicates: parameters are sharded over the second, and
  // gradients, averaged over all ranks, are summed over the first as well (PyTorch: HSDP; with one
  // rank in the second, DDP).
  DeviceMesh mesh;
  MixedPrecision precision = {};
  Reshard reshard_after_forward = Reshard::automatic;
  // How many gathers backward queues ahead of the unit that it enters, 1 to 64; in forward it only
  // says how many have slots apart, and so limits how far gathers run ahead.
  int prefetch_depth = 1;
  // How much of gradients is being reduced beside what is being written, 1 to 64: so many times the
  // largest piece of the unit, less a third of one; of a unit that calls others, all its pieces.
  int reductions_in_flight = 1;
  // Of the root: how many of its forwards, or calls of a unit without it, the host may be ahead of
  // the device, 1 to 64, so that its memory is bounded however seldom the program reads a value.
  // Other units take no notice of it, nor of slice_bytes: one set of options serves all of a model.
  int forwards_ahead = 2;
  // Of the root: the most that one slice of a streamed parameter may have, in bytes of the full
  // tensor; see nn::Module::stream_parameter. 0: so much that the gradient of a slice is no larger
  // than the largest piece of any unit. Slices are larger where a table would have more than 256.
  std::int64_t slice_bytes = 0;
  // Whether slices wait, too, where a backward reduces nothing (set_requires_gradient_sync): the
  // whole gradient of a table is there then, on every rank. Otherwise each backward reduces them.
  bool slices_wait = false;
  // A unit's gradients are reduced in pieces, each as soon as backward has made it: a parameter
  // with so many bytes of gradient is one, smaller ones fill one together. A piece should take
  // several times the latency of a collective.
  std::int64_t piece_bytes = std::int64_t{32} << 20;
  // Chunks of at most so many bytes in f32, of parameters that fill no piece, travel packed: norms
  // and biases, each of which is a step of the wire otherwise. Two kernels a unit copy them, behind
  // its gather and before its reduction. None do where these chunks, each aligned to 64 elements in
  // a reduction, would be more than half of the unit's parameters or gradients, as of a model of a
  // few KiB. 0: none.
  std::int64_t packed_bytes = 4096;
  // The same for all units of a root.
  Offload offload = Offload::none;
  // Along which dimension a parameter is sharded; unset, or Shard{}: by rows. A negative dimension
  // counts from the back. Along another than 0 the ranks have parts of one size, and value(),
  // shard() and grad() give views with that dimension outermost: products read and write them as
  // they are, what wants contiguous rows copies. Asked of each parameter that the unit claims.
  // fully_shard throws where the ranks that shard do not divide the dimension, and for a parameter
  // with blocks of rows or a gather transform. Such a table is not streamed, and its module reads
  // it in backward.
  std::function<Shard(const Parameter&)> shard_placement_fn{};
  // Parameters that the unit leaves alone (PyTorch: ignored_params); units around it must, too.
  // Each rank has them whole and in f32, with its own gradients. Nothing divides or sums these: the
  // program does, before it clips. An optimizer skips one that this rank has not used, whatever is
  // written to grad(); to use it, add 0 * p to the loss. materialize, init, optimizers, state dicts
  // and reset take them as those of a module without units. Not with offload, nor in a model that
  // has memory.
  std::vector<Parameter> ignored{};
};

// Makes `module` a unit. Call inner modules first; the outermost call makes the root. Values that
// exist are kept, and an optimizer's moments of them; gradients are not. Throws: ContractError for
// a module that is a unit already; for a parameter that a unit outside this module shares, that a
// unit inside ignores and this one does not, or that is to be ignored and lies in a unit; for
// options that cannot take effect. The root's first call throws, on every rank, where ranks have
// made other units, given other options or frozen other parameters.
void fully_shard(nn::Module& module, const ShardOptions& options, Caller at = Caller::current());
// Makes several modules one unit, of all parameters below them:
//
//   fully_shard({&model.norm, &model.head}, {.mesh = mesh});
//
// Its modules may be called in any order and at any depth under a root, which the unit itself can't
// be. The first call gathers, and the unit stays open until all modules have been called, or until
// the outermost call of the root's units ends; so ranks call the same of them before other units.
// Backward gathers once for these calls, and reduces once, where it has come back through the
// first. What is called after that, as a head for each chunk of a loss, is gathered and reduced for
// itself. A module inside another one of the list belongs to that one. Throws: as above, and
// ContractError for an empty list, a null pointer, and a module that is there twice.
void fully_shard(const std::vector<nn::Module*>& modules, const ShardOptions& options,
                 Caller at = Caller::current());

// In the place of a backward that peers run and this rank leaves out, because its loss is no number
// or does not reach the model: issues what theirs does, with gradients of zero. Before anything
// else of the model. Of all forwards that no backward of this rank has covered, or of those that a
// backward of `loss` would reach. A forward whose graph is gone needs none: the next pass covers
// it. Of several forwards that peers cover in one pass a rank may cover each in one of its own,
// from the last to the first, where none before them is gone. With several roots it is the loss
// that knows the order of their calls. Where peers retain the graph of `loss`, so does this rank,
// for the backward that follows. Throws: ContractError for a module that is no root, for a tensor
// without history, and inside of a backward pass; CommError when a peer does something else.
void skip_backward(nn::Module& root);
void skip_backward(const Tensor& loss, bool retain_graph = false);

// Calls f(name, full tensor) for every parameter below `module`, gathered one at a time from the
// shards in the dtype that they are stored in, in the same order on every rank. The tensor is lent
// for the call of f, for reading. Collective over each mesh. Throws: ContractError for a parameter
// without memory, where optimizers have made other numbers of steps on ranks that shard them, and
// where the tensor is used later.
void for_each_full_parameter(
    nn::Module& module, const std::function<void(const std::string& name, const Tensor& full)>& f);

}  // namespace tessera
