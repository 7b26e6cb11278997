#include "runtime/shard/packed_parameters.hpp"

namespace tessera::shard {
namespace {

std::vector<PackedChunks::Chunks> small_chunks(const UnitShards& shards) {
  std::vector<PackedChunks::Chunks> of;
  for (const std::size_t i : shards.layout().packed.entries)
    of.push_back(
        {shards.layout().gather_offset_bytes[i], shards.parameters()[i]->spec.chunk_numel()});
  return of;
}

}  // namespace

PackedParameters::PackedParameters(const UnitShards& shards, std::vector<GatheredPart>& parts)
    : GatherStage(Place::packed),
      gather_(shards.device().gather()),
      chunks_(shards, shards.layout().packed, PackedChunks::Way::out, shards.param_dtype(),
              small_chunks(shards)) {
  const PackedLayout& packed = shards.layout().packed;
  parts.push_back({packed.offset_bytes, packed.numel, shards.param_dtype()});
}

}  // namespace tessera::shard
