// The ways to train that every promise is checked in.
#pragma once

#include <optional>
#include <ostream>
#include <vector>

#include "tessera/shard/fully_shard.hpp"
#include "tests/support/accumulation.hpp"

namespace tessera::testing {

// One way to train. The batch is global: ranks and micro-batches share it.
struct Cell {
  Reshard reshard = Reshard::automatic;
  bool recomputes = false, selectively = false, tied = false, freezes = false,
       keeps_gradients = false;
  int micro_batches = 1;
  DType param = f32, reduce = f32;
  std::int64_t layers = 2;
  int prefetch_depth = 1, reductions_in_flight = 1;
  std::int64_t loss_chunk = nn::kLossChunk;  // 40 elements: 3 rows at a time
  std::int64_t slice_bytes = 400;            // two slices of the tables on 2 to 4 ranks; 0: one
  std::int64_t piece_bytes = 700;            // most matrices of a block are pieces of their own
  int replicas = 1;                          // on as many ranks or a multiple of them
  bool scales_loss = false;
  Accumulation accumulation = Accumulation::reduced;
  Offload offload = Offload::none;
  bool encodes = false;  // matrices are gathered in e4m3
  bool ragged = false;   // the blocks' matrices are cut by blocks of five rows
  bool lists = false;    // two blocks are a unit
  bool by_hand = false;  // by columns, and as decisions.hpp says, as are the next
  std::optional<DType> stored{}, output{};  // of a frozen base; of what units give
  bool ignores = false;                     // units leave the base's gains alone
  bool is_fast = false;                     // the loss knows its gradient, and the optimizer clips
  bool orthogonalises = false;              // the optimizer is Muon, in several turns
  bool fused = false;                       // projections
  bool changes = false;                     // its options between steps, as decisions.hpp says
  bool inner = false;                       // a unit within each block's, as decisions.hpp says
  bool backwards = false;                   // the mesh is given by hand: the last rank is first
  std::int64_t every = 1;                   // of so many blocks one is recomputed
  bool roots = false;                       // each part is one, and the norm
};
inline std::ostream& operator<<(std::ostream& out, const Cell& c) {
  return out << "reshard " << c.reshard << ", recompute " << c.recomputes
             << (c.selectively ? " by operation" : "") << ", tied " << c.tied << ", frozen "
             << c.freezes << ", micro-batches " << c.micro_batches << ", " << c.param << '/'
             << c.reduce << ", layers " << c.layers << ", prefetch " << c.prefetch_depth
             << ", in flight " << c.reductions_in_flight << ", loss chunk " << c.loss_chunk
             << ", slices of " << c.slice_bytes << ", pieces of " << c.piece_bytes << ", replicas "
             << c.replicas << ", scaled loss " << c.scales_loss << ", accumulation "
             << static_cast<int>(c.accumulation) << ", offload " << static_cast<int>(c.offload)
             << ", in e4m3 " << c.encodes << ", ragged " << c.ragged << ", lists " << c.lists
             << ", by hand " << c.by_hand << ", base in " << (c.stored ? name(*c.stored) : "none")
             << ", output " << (c.output ? name(*c.output) : "as it is") << ", gains ignored "
             << c.ignores << ", fast " << c.is_fast << ", Muon " << c.orthogonalises << ", fused "
             << c.fused << ", changes " << c.changes << ", inner units " << c.inner
             << ", ranks backwards " << c.backwards << ", one block recomputed of " << c.every
             << ", roots " << c.roots;
}

// The cells that every promise is checked in.
inline std::vector<Cell> cells() {
  return {
      {.slice_bytes = 0, .piece_bytes = 1 << 20},
      {.reshard = Reshard::always},
      {.reshard = Reshard::never},
      {.recomputes = true},
      {.reshard = Reshard::never, .recomputes = true, .loss_chunk = 40},
      {.tied = true},
      {.recomputes = true, .tied = true, .loss_chunk = 40},
      {.freezes = true},
      {.recomputes = true, .freezes = true, .micro_batches = 3},
      {.recomputes = true, .selectively = true, .freezes = true, .micro_batches = 3},
      {.micro_batches = 3},
      {.reshard = Reshard::always, .keeps_gradients = true, .micro_batches = 3, .loss_chunk = 40},
      {.reshard = Reshard::to(2), .tied = true, .micro_batches = 3},
      {.layers = 4, .prefetch_depth = 3, .reductions_in_flight = 2},
      {.micro_batches = 3, .replicas = 2},
      {.reshard = Reshard::never, .micro_batches = 3, .accumulation = Accumulation::unsharded},
      {.micro_batches = 3, .replicas = 2, .accumulation = Accumulation::in_replicas},
      {.micro_batches = 3, .offload = Offload::cpu},
      {.reshard = Reshard::always, .freezes = true, .encodes = true},
      {.reshard = Reshard::always, .freezes = true, .micro_batches = 3, .ragged = true},
      {.tied = true, .micro_batches = 3, .loss_chunk = 40, .slice_bytes = 0, .is_fast = true},
      {.reshard = Reshard::always, .recomputes = true, .loss_chunk = 40, .is_fast = true},
      {.micro_batches = 3, .layers = 4, .lists = true},
      {.micro_batches = 3, .by_hand = true, .stored = e4m3, .ignores = true},
      {.reshard = Reshard::always, .freezes = true, .micro_batches = 3, .fused = true},
      {.layers = 3, .changes = true},
      {.micro_batches = 3, .inner = true, .backwards = true},
      {.recomputes = true, .layers = 3, .every = 2},
      {.micro_batches = 3, .roots = true},
      {.recomputes = true,
       .micro_batches = 3,
       .replicas = 2,
       .accumulation = Accumulation::unsharded,
       .offload = Offload::cpu},
      {.reshard = Reshard::never,
       .recomputes = true,
       .tied = true,
       .freezes = true,
       .replicas = 2,
       .offload = Offload::cpu}};
}
inline std::vector<Cell> narrow_cells() {
  return {
      {.param = bf16},
      {.param = bf16, .reduce = bf16},
      {.param = bf16, .reduce = bf16, .replicas = 2},
      {.reshard = Reshard::never, .micro_batches = 3, .param = bf16},
      {.micro_batches = 3, .param = bf16, .accumulation = Accumulation::unsharded},
      {.recomputes = true, .tied = true, .param = bf16, .loss_chunk = 40},
      {.reshard = Reshard::to(2), .recomputes = true, .param = bf16, .offload = Offload::cpu},
      {.recomputes = true, .selectively = true, .tied = true, .param = bf16},
      {.micro_batches = 3, .param = bf16, .offload = Offload::cpu, .encodes = true},
      {.recomputes = true, .param = bf16, .replicas = 2, .ragged = true},
      {.param = bf16, .loss_chunk = 40, .slice_bytes = 0, .is_fast = true},
      {.param = bf16, .reduce = bf16, .offload = Offload::cpu, .ragged = true},
      {.recomputes = true,
       .param = bf16,
       .offload = Offload::cpu,
       .by_hand = true,
       .stored = e5m2,
       .output = f32},
      {.reshard = Reshard::never,
       .param = bf16,
       .replicas = 2,
       .by_hand = true,
       .stored = bf16,
       .output = f32,
       .ignores = true},
      {.recomputes = true, .selectively = true, .param = bf16, .fused = true},
      {.recomputes = true, .param = bf16, .layers = 3, .changes = true},
      {.reshard = Reshard::always, .param = bf16, .replicas = 2, .inner = true, .backwards = true},
      {.reshard = Reshard::always, .recomputes = true, .param = bf16, .roots = true},
      {.param = f16, .scales_loss = true},
      {.recomputes = true, .micro_batches = 3, .param = f16, .reduce = f16},
      {.keeps_gradients = true, .param = bf16, .offload = Offload::cpu},
      {.param = f16, .reduce = f16, .scales_loss = true, .offload = Offload::cpu}};
}

inline std::vector<Cell> all_cells() {
  std::vector<Cell> all = cells();
  for (const Cell& cell : narrow_cells()) all.push_back(cell);
  return all;
}

// On how many ranks each a cell is seen where three numbers are enough: shards within replicas, and
// parts of shards (Reshard::to), take four.
inline std::vector<int> worlds_of(const Cell& cell) {
  return {1, 2, cell.replicas > 1 || cell.reshard.is_partial() ? 4 : 3};
}

}  // namespace tessera::testing
