// fully_shard: per-parameter sharding with the semantics of PyTorch's FSDP2.
//
//   for (auto& block : model.blocks) fully_shard(block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});                       // claims what the blocks did not
//
// Each call makes a unit: the parameters below the module that no inner call has claimed. Each rank
// keeps its rows of them. When the module is called, the unit gathers the other ranks' rows, and
// when the call ends, it frees them. Backward gathers them once more. The unit that forward calls
// last stays gathered until backward has used it. One step of two blocks on three streams:
//
//   gather   │ g0 │ g1 │ g0 │                            each as soon as its slot is free
//   compute       │ f0 │ f1 │ loss │ b1     │ b0     │    │ optimizer
//   reduce                                  │ r1     │ r0 │
//
// Every rank calls the same units in the same order. What a rank does with their results is its own
// affair. A module that only some ranks call, for example an expert, must lie in a unit that all of
// them call. It must not be streamed, because each slice of a streamed parameter is a unit.
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
  static const Reshard always;
  // Open until backward has ended. Where no backward comes, the next call finds the unit open. It
  // gathers only if the parameters were written in between.
  static const Reshard never;
  // As `always`, except for the units that backward needs at once: the root, and the unit that
  // forward calls last.
  static const Reshard automatic;
  // From forward to backward each rank keeps 1/ranks of the full parameters. Backward gathers them
  // from a group of `ranks` neighbours, this rank among them (ZeRO++: hpZ). Neighbours are on one
  // machine where that is possible. `ranks` divides the number of ranks that shard, and is neither
  // 1 nor all of them. The mesh has all ranks of the world.
  static constexpr Reshard to(int ranks) noexcept { return {Kind::to, ranks}; }

  bool operator==(const Reshard&) const = default;
  constexpr bool is_partial() const noexcept { return kind_ == Kind::to; }
  constexpr int ranks() const noexcept { return ranks_; }  // of `to`
  // "always", "to(8)"
  std::string to_string() const {
    static constexpr const char* kNames[] = {"automatic", "always", "never"};
    return is_partial() ? concat("to(", ranks_, ')') : kNames[static_cast<int>(kind_)];
  }
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

// The dtypes of a unit: f32, bf16 or f16 each (PyTorch: MixedPrecisionPolicy).
struct MixedPrecision {
  // The dtype of the full parameters, and so of compute; unset: f32. It holds for parameters that
  // are stored in f32. A parameter that Parameter::set_dtype stores otherwise is gathered as it is.
  std::optional<DType> param{};
  // The dtype of gradients on the wire: f32 or `param`; unset: f32.
  std::optional<DType> reduce{};
  // The dtype of floating tensors that a call of the module returns; unset: they stay as they are.
  // The unit finds tensors where hooks find them: see nn::Module::call.
  std::optional<DType> output{};
  // Whether floating tensors that go into a call are cast to `param`, if that is set.
  bool cast_forward_inputs = true;
  // Gives one parameter another dtype than `param`, or std::nullopt to keep `param` (PyTorch:
  // param_dtype_override_fn). For example, the router of a block in bf16 computes in f32:
  //
  //   .param_override_fn = [&](const Parameter& p) {
  //     return p == block.router.weight ? std::optional(f32) : std::nullopt; }
  //
  // It is asked for each parameter that the unit claims. The module that uses the parameter must
  // cast its inputs to that dtype. The parameter is gathered with the others, in its own dtype. It
  // travels packed only if that dtype is `param`. fully_shard throws where gradients of that dtype
  // can't be reduced in `reduce`.
  std::function<std::optional<DType>(const Parameter&)> param_override_fn{};
};

// Where a unit's shards, gradients and moments lie, and where its optimizer runs (PyTorch:
// CPUOffloadPolicy, always pinned).
//
//   none   on the device
//   cpu    on the host beside the device (Device::host). A gather casts there, and copies the
// unit's
//          shard to the device in one copy for each dtype. A reduction copies the sums of a piece
//          back in one copy.
//          Parameter::shard and grad, state dicts and clip_grad_norm's norm are tensors of the
//          host; their operations run on the stream `offload`. The device keeps slots, activations,
//          and staging for two of the largest shards and two of the largest pieces. On a CPU, host
//          and device are one memory. They are counted apart all the same, so the plan is that of a
//          GPU.
enum class Offload : std::uint8_t { none, cpu };

struct ShardOptions {
  // A mesh of one dimension shards over it. A mesh of two shards over the second and replicates
  // over the first (PyTorch: HSDP). Gradients are the mean over all ranks. With one rank in the
  // second dimension this is DDP. All units of a root have one mesh.
  DeviceMesh mesh;
  MixedPrecision precision = {};
  Reshard reshard_after_forward = Reshard::automatic;
  // How many gathers backward queues ahead of the unit that it enters, 1 to 64. In forward this
  // many gathers have their own slots, beside the slot of the open unit. So it also limits how far
  // gathers run ahead in forward.
  int prefetch_depth = 1;
  // How many gradients may wait for the network, 1 to 64. Backward fills a unit's gradients piece
  // by piece (`piece_bytes`). Before it fills the next one it waits, on the device, until the
  // queued pieces fit into this limit. 1 needs least memory, and 2 hides a slow network. A piece's
  // memory is used again once (`reductions_in_flight` - 1/3) times the bytes of the unit's largest
  // piece are queued behind it. A unit that calls other units sends all its pieces together, and
  // the limit counts all of them.
  int reductions_in_flight = 1;
  // How many forwards of the root the host may be ahead of the device, 1 to 64. It bounds the
  // host's memory in a program that seldom reads a value. Only the root's value counts, so one set
  // of options serves a whole model. For slice_bytes, too, only the root's value counts.
  int forwards_ahead = 2;
  // The most bytes that one slice of a streamed parameter has, counted in the full tensor; see
  // nn::Module::stream_parameter. 0: the gradient of a slice is at most as large as the largest
  // piece of any unit. A parameter has at most 256 slices, so a slice of a very large one has more
  // bytes.
  std::int64_t slice_bytes = 0;
  // Whether gradients of slices wait, too, while set_requires_gradient_sync holds reductions back.
  // If true, each rank meanwhile keeps the whole gradient of a streamed parameter. If false, each
  // backward reduces its slices.
  bool slices_wait = false;
  // A unit's gradients are reduced in pieces, each as soon as backward has made it. A parameter
  // with at least `piece_bytes` of gradient is a piece. Smaller ones fill a piece together. A piece
  // should take several times as long as the latency of a collective.
  std::int64_t piece_bytes = std::int64_t{32} << 20;
  // Small chunks, as those of norms and biases, travel packed: unpacked, each would be a message of
  // its own. Small is a chunk of at most this many bytes in f32, whose parameter has less than
  // `piece_bytes` of gradient. Two kernels of a unit copy such chunks. A gather packs nothing if
  // small chunks are more than half of the unit's bytes. A reduction packs nothing if small
  // chunks are more than half of its gradients. A reduction counts each small chunk rounded up to
  // 64 elements. One small chunk alone is not packed. 0: none.
  std::int64_t packed_bytes = 4096;
  // The same for all units of a root.
  Offload offload = Offload::none;
  // Along which dimension a parameter is sharded; unset, or Shard{}: by rows. It is asked of each
  // parameter that the unit claims. A negative dimension counts from the back. Along another
  // dimension than 0 all ranks have parts of one size. value(), shard() and grad() are then views
  // with that dimension outermost. Products read such views as they are; other operations may copy
  // them. Such a parameter is not streamed, and backward gathers it. fully_shard throws where the
  // ranks do not divide the dimension, and for a parameter with blocks of rows or a gather
  // transform.
  std::function<Shard(const Parameter&)> shard_placement_fn{};
  // Parameters that the unit leaves alone (PyTorch: ignored_params). Units around it must ignore
  // them, too. Each rank has them whole and in f32, with its own gradients. The program divides and
  // sums these gradients before it clips. An optimizer skips a parameter that this rank has not
  // used, whatever is written to grad(). To make an unneeded parameter count as used, add `0 * p`
  // to the loss. materialize, init, optimizers, state dicts and reset treat them as parameters
  // without units. A unit with Offload::cpu cannot ignore parameters. A model that has memory
  // already can ignore only parameters that were registered since then. Ranks may have different
  // values of an ignored parameter. Then an operation that would keep only rank 0's value is an
  // error: save_weights, a load from rank 0, a state dict for rank 0.
  std::vector<Parameter> ignored{};
};

// Makes `module` a unit. Call it for inner modules first; the outermost call makes the root. Values
// that exist are kept, and so are an optimizer's moments of them. Gradients are not kept.
//   A model that has run may grow between steps, on every rank alike. The root's next call takes in
// units that were made below it. A unit that has run as a root of its own is taken in, too. The
// root's next call throws for a parameter that lies in no unit and is not ignored.
//   Called again for a unit, this takes in the parameters that were registered below its module
// since, and gives them memory where the unit has some. The unit is made anew on its mesh, with
// these options. Decisions by shard/runtime_control.hpp are forgotten for this unit.
//   Throws: ContractError
//   - for a module that is a unit already and has nothing new;
//   - where a forward used a unit that changes and its backward has still to come, or where
//     gradients of such a unit wait unreduced;
//   - for a parameter that a unit outside this module shares; for one that this unit claims and a
//     unit inside ignores; for one that is to be ignored and lies in a unit;
//   - for options that cannot take effect.
// The root's next call throws on every rank where ranks have made different units, given different
// options or frozen different parameters.
void fully_shard(nn::Module& module, const ShardOptions& options, Caller at = Caller::current());
// Makes several modules one unit, of all parameters below them:
//
//   fully_shard({&model.norm, &model.head}, {.mesh = mesh});
//
// The modules may be called in any order and at any depth under a root. The unit itself cannot be
// the root. The first call gathers. The unit stays open until all its modules have been called, and
// at the latest until the outermost running call of a unit under the root ends. So all ranks must
// call the same modules of the list before they call other units. Backward gathers once for these
// calls, and reduces once, when it has come back through the first. A module may be called again
// later, for example a head for each chunk of a loss. Each such call gathers and reduces for
// itself. A module inside another one of the list belongs to that one.
//   Throws: as above, and ContractError for an empty list, a null pointer, and a module that is
// there twice.
void fully_shard(const std::vector<nn::Module*>& modules, const ShardOptions& options,
                 Caller at = Caller::current());

// Stands in for a backward that peers run and this rank leaves out, because its loss is no number
// or does not reach the model. It makes the same collectives as theirs, with gradients of zero.
// Call it before anything else of the model.
//   With a root it covers all forwards that no backward of this rank has covered. With a loss it
// covers those that a backward of `loss` would reach. If several roots were called, pass a
// loss, since a root does not tell their order. A forward whose graph is gone needs no call, since
// the next pass covers it. Where peers cover several forwards in one pass, a rank may cover them
// one by one, from the last to the first. The graphs of the earlier forwards must then still exist.
// If peers retain the graph of `loss`, pass `retain_graph = true`.
//   Throws: ContractError for a module that is no root, for a tensor without history, and inside of
// a backward pass; CommError when a peer does something else.
void skip_backward(nn::Module& root);
void skip_backward(const Tensor& loss, bool retain_graph = false);

// Calls f(name, full tensor) for every parameter below `module`, in the same order on every rank.
// Each is gathered from the shards when its turn comes, in the dtype in which it is stored. f may
// read the tensor until it returns. Collective over each mesh.
//   Throws: ContractError for a parameter without memory; if the ranks of its mesh have made
// different numbers of optimizer steps; if the tensor is used after f has returned.
void for_each_full_parameter(
    nn::Module& module, const std::function<void(const std::string& name, const Tensor& full)>& f);

}  // namespace tessera
