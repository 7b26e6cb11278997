#include "runtime/shard/packed_chunks.hpp"

namespace tessera::shard {

PackedChunks::PackedChunks(const UnitShards& shards, const PackedLayout& layout, Way way,
                           DType dtype, const std::vector<Chunks>& of)
    : way_(way) {
  const auto element = static_cast<std::int64_t>(size_bytes(dtype));
  std::vector<std::int64_t> rows;  // from, in elements; to, in bytes; how many
  std::int64_t end_bytes = layout.offset_bytes + shards.size() * layout.numel * element;
  for (std::size_t i = 0; i < layout.entries.size(); ++i) {
    const Chunks& chunks = of[i];
    for (int r = 0; r < shards.size(); ++r) {
      const std::int64_t apart = chunks.offset_bytes / element + r * chunks.numel,
                         packed = layout.offset_bytes / element + r * layout.numel + layout.at[i];
      const auto [from, to] = way == Way::out ? std::pair(packed, apart) : std::pair(apart, packed);
      rows.insert(rows.end(), {from, to * element, chunks.numel});
      numel_ += chunks.numel;
    }
  }
  table_ = kernel_table(rows, shards.device());
  storage_ = std::make_shared<Storage>(Storage{.device = shards.device(), .bytes = end_bytes});
  whole_ = Tensor::wrap(storage_, {end_bytes / element}, dtype);
}

void PackedChunks::copy(Stream stream, const Slot& slot) const {
  storage_->data = slot.data;
  storage_->use = slot.use;
  pack(way_ == Way::out ? "unpack_chunks" : "pack_chunks", stream, table_, numel_, whole_, slot,
       whole_.dtype());
  storage_->data = nullptr;
}

}  // namespace tessera::shard
