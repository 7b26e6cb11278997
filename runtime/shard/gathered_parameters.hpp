// The parameters of a unit as full tensors: gathered into a slot, read through windows, let go of.
// A unit drives these steps; none of them blocks the host.
//
//   closed ──gather──▶ gathering ──open──▶ open ──close──▶ closed, or gathering where it stays
//              │ slot taken,        │ compute waits,   │ windows shut,
//              │ all-gather queued  │ windows set      │ slot given back, or not
//
//   gather    wait updated │ pack_shard │ all_gather │ record ┐
//   compute                                                   └ wait │ kernels read the slot
//
// What is small is copied out of where it travels behind the all-gather: PackedChunks.
// Shards that lie on the host come first to where the gather stream packs them: HostLink.
//
// PyTorch FSDP2 calls the steps unshard, wait_for_unshard and reshard. There a copy brings what was
// gathered into the parameters; here kernels read it where the all-gather has put it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/shard/packed_chunks.hpp"
#include "runtime/shard/post_forward_shards.hpp"
#include "runtime/shard/prepared_groups.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class GatheredParameters {
 public:
  // `shards` outlives this.
  explicit GatheredParameters(const UnitShards& shards)
      : shards_(shards), prepared_(shards.device, StreamId::gather) {}
  ~GatheredParameters() { close_unchecked(); }

  // Gives the parameters their windows, once the shards have memory.
  void materialize();

  // --- the steps ---
  // Casts this rank's shards into a slot and queues the all-gather `name` around them, unless that
  // is queued, and not stale, or done. Whether an all-gather was queued.
  // Throws: ContractError while the shards are not consistent; see ShardReset.
  bool gather(const char* name);
  // Makes the full tensors usable by later work on the compute stream.
  void open();
  // `ends_forward`: backward will come. Where it comes here next, what was gathered stays.
  // Throws, closed all the same: ContractError for a full tensor that somebody still holds.
  void close(bool ends_forward = false);

  // --- Reshard::to ---
  // What forward opens these neighbours keep for backward; null: nobody. Collective over them.
  void keep_over(const RankGroup* neighbours);
  // Before the close that ends a forward: keeps this rank's part.
  void keep_part();
  void drop_part() noexcept;
  const PostForwardShards* kept() const noexcept { return kept_.get(); }

  // How often the shards were written; whether since they were gathered.
  std::uint64_t version() const noexcept;
  bool is_stale() const noexcept;
  // For a step that failed: as `close`, and nobody hears of escapes.
  void close_unchecked(bool ends_forward = false) noexcept;
  // See Arena::note_uses.
  void note_uses() {
    if (slot_.arena) slot_.arena->note_uses(slot_);
  }

 private:
  enum class State : std::uint8_t { closed, gathering, open };
  static const char* name(State state) noexcept;

  void advance(State from, State to);
  bool uses_slot() const noexcept { return shards_.gather_bytes() > 0; }
  // Of one flat group, what is packed of this rank's chunks.
  struct Source {
    FlatGroup* group;
    UnitShards::ValueRange own;  // of its values
    DType dtype;                 // in the slot
    Tensor table;                // of kernels::PackEntry
    std::int64_t numel;
  };

  void add_parts(const ParameterState& p, std::int64_t offset_bytes);
  Collective item_of(const GatheredPart& part) const;
  void make_sources(FlatGroup& group);
  void make_source(FlatGroup& group, const UnitShards::ValueRange& range);
  bool fill_slot(const char* name);
  void shut_windows() noexcept;
  // Names a parameter that somebody outside still holds, empty for none.
  std::string escape() const;

  const UnitShards& shards_;
  PreparedGroups prepared_;
  std::unique_ptr<PostForwardShards> kept_;
  std::vector<Tensor> full_;  // what Parameter::value gives: steady steps make none
  std::vector<Source> sources_;
  std::vector<GatheredPart> parts_;
  std::unique_ptr<EncodedParameters> encoded_;  // null for none
  std::unique_ptr<PackedChunks> packed_;        // likewise
  State state_ = State::closed;
  Slot slot_;
  Event gathered_;
  std::uint64_t gathered_version_ = 0;
};

}  // namespace tessera::shard
