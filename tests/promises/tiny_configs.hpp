// The ways to train that schedules are tried in: what cells.hpp is to the other promises. No test
// framework here.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/nn/llama.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/support/accumulation.hpp"

namespace tessera::testing {

// One way to train. Names are stable: a kept seed names its configuration.
struct TinyConfig {
  const char* name;
  int ranks = 2;
  Reshard reshard = Reshard::automatic;
  nn::Recompute recompute = nn::Recompute::none;
  bool tied = false, freezes = false;
  bool reads_losses = false;  // the host blocks in every step
  int micro_batches = 1;
  DType param = f32, reduce = f32;
  std::int64_t layers = 2;
  int prefetch_depth = 1, reductions_in_flight = 1;
  std::int64_t piece_bytes = 80;  // some matrices of a block are pieces of their own
  std::int64_t slice_bytes = 1;   // each row of a rank's part of a table is a slice; 0: one slice
  int steps = 2;
  int replicas = 1;
  Accumulation accumulation = Accumulation::reduced;
  Offload offload = Offload::none;
  bool hooks = false;    // reductions call a hook, which doubles what they left
  bool encodes = false;  // the blocks' matrices are gathered in e4m3
  bool lists = false;    // the blocks are one unit
  bool ragged = false;   // the blocks' matrices are cut by blocks of two rows
  bool by_hand = false;  // by columns, and as decisions.hpp says, what changes between steps, too
  std::optional<DType> stored{}, output{};  // of a frozen base; of what units give
  bool ignores = false;                     // units leave the base's gains alone
  bool orthogonalises = false;              // the optimizer is Muon, a turn for each matrix
  bool inner = false;                       // a unit within each block's, as decisions.hpp says
  bool backwards = false;                   // the mesh is given by hand: the last rank is first
  bool roots = false;                       // each part is one, and the norm
};

inline constexpr TinyConfig kTinyConfigs[] = {
    {.name = "plain-2", .piece_bytes = 1 << 20, .slice_bytes = 0},
    {.name = "plain-3", .ranks = 3, .reads_losses = true},
    {.name = "always-2", .reshard = Reshard::always, .steps = 3},
    {.name = "always-3", .ranks = 3, .reshard = Reshard::always},
    {.name = "never-2", .reshard = Reshard::never, .reads_losses = true, .steps = 3},
    {.name = "never-3", .ranks = 3, .reshard = Reshard::never},
    {.name = "accumulate-2", .reshard = Reshard::always, .micro_batches = 2},
    {.name = "accumulate-never-3", .ranks = 3, .reshard = Reshard::never, .micro_batches = 2},
    {.name = "recompute-2", .recompute = nn::Recompute::blocks, .reads_losses = true},
    {.name = "recompute-never-3",
     .ranks = 3,
     .reshard = Reshard::never,
     .recompute = nn::Recompute::blocks},
    {.name = "bf16-2", .reshard = Reshard::always, .param = bf16},
    {.name = "bf16-reduce-3", .ranks = 3, .param = bf16, .reduce = bf16},
    {.name = "bf16-accumulate-2", .micro_batches = 2, .param = bf16},
    {.name = "f16-3", .ranks = 3, .param = f16, .reduce = f16},
    {.name = "tied-2", .tied = true},
    {.name = "tied-recompute-3", .ranks = 3, .recompute = nn::Recompute::blocks, .tied = true},
    {.name = "frozen-2", .freezes = true, .reads_losses = true},
    {.name = "deep-2", .layers = 4, .prefetch_depth = 2, .reductions_in_flight = 2},
    {.name = "deep-always-3",
     .ranks = 3,
     .reshard = Reshard::always,
     .layers = 3,
     .prefetch_depth = 3,
     .reductions_in_flight = 2},
    {.name = "replicas-4", .ranks = 4, .replicas = 2},
    {.name = "unsharded-3",
     .ranks = 3,
     .micro_batches = 2,
     .param = bf16,
     .accumulation = Accumulation::unsharded},
    {.name = "in-replicas-4",
     .ranks = 4,
     .micro_batches = 3,
     .replicas = 2,
     .accumulation = Accumulation::in_replicas},
    {.name = "offload-2", .reshard = Reshard::always, .micro_batches = 2, .offload = Offload::cpu},
    {.name = "offload-bf16-3", .ranks = 3, .param = bf16, .reduce = bf16, .offload = Offload::cpu},
    {.name = "to-4", .ranks = 4, .reshard = Reshard::to(2), .micro_batches = 2},
    {.name = "selective-2", .recompute = {.every = 1, .keep = {.products = 2, .attention = true}}},
    {.name = "hook-3", .ranks = 3, .micro_batches = 2, .hooks = true},
    {.name = "encoded-2", .reshard = Reshard::always, .param = bf16, .encodes = true},
    {.name = "encoded-offload-3", .ranks = 3, .offload = Offload::cpu, .encodes = true},
    {.name = "list-3", .ranks = 3, .micro_batches = 2, .lists = true},
    {.name = "by-hand-2", .reshard = Reshard::always, .steps = 3, .by_hand = true},
    {.name = "ragged-3", .ranks = 3, .micro_batches = 2, .param = bf16, .ragged = true},
    {.name = "ragged-replicas-4", .ranks = 4, .replicas = 2, .ragged = true},
    {.name = "adapters-3",
     .ranks = 3,
     .micro_batches = 2,
     .param = bf16,
     .stored = e4m3,
     .output = f32,
     .ignores = true},
    {.name = "adapters-by-hand-2",
     .recompute = nn::Recompute::blocks,
     .param = bf16,
     .steps = 3,
     .offload = Offload::cpu,
     .by_hand = true,
     .stored = e4m3,
     .output = f32},
    {.name = "adapters-by-hand-4",
     .ranks = 4,
     .reshard = Reshard::never,
     .micro_batches = 2,
     .replicas = 2,
     .by_hand = true,
     .stored = bf16,
     .ignores = true},
    {.name = "muon-3", .ranks = 3, .micro_batches = 2, .orthogonalises = true},
    {.name = "muon-replicas-4", .ranks = 4, .replicas = 2, .orthogonalises = true},
    {.name = "inner-3", .ranks = 3, .param = bf16, .inner = true, .backwards = true},
    {.name = "inner-replicas-4",
     .ranks = 4,
     .micro_batches = 2,
     .replicas = 2,
     .inner = true,
     .backwards = true},
    {.name = "roots-2", .reshard = Reshard::always, .micro_batches = 2, .roots = true},
    {.name = "roots-bf16-3", .ranks = 3, .param = bf16, .reduce = bf16, .roots = true},
};

}  // namespace tessera::testing
