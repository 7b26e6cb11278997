#include "runtime/shard/packed_gradients.hpp"

namespace tessera::shard {
namespace {

std::vector<PackedChunks::Chunks> small_chunks(const UnitShards& shards, const PieceLayout& piece) {
  std::vector<PackedChunks::Chunks> of;
  for (const std::size_t entry : piece.packed.entries) {
    const ParameterState& p = *shards.parameters()[shards.parameter_of()[piece.first + entry]];
    of.push_back({piece.offset_bytes[entry], p.spec.chunk_numel()});
  }
  return of;
}

}  // namespace

PackedGradients::PackedGradients(const UnitShards& shards, const PieceLayout& piece)
    : ReduceStage(Place::packed),
      reduce_(shards.device().reduce()),
      chunks_(shards, piece.packed, PackedChunks::Way::in, shards.reduce_dtype(),
              small_chunks(shards, piece)) {}

}  // namespace tessera::shard
