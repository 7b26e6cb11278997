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
// What options add to a gather is a GatherStage each: parts that Reshard::to keeps, shards on the
// host, small chunks that travel packed, parameters that travel encoded.
//
// PyTorch FSDP2 calls the steps unshard, wait_for_unshard and reshard. There a copy brings what was
// gathered into the parameters; here kernels read it where the all-gather has put it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/shard/gather_stage.hpp"
#include "runtime/shard/prepared_groups.hpp"
#include "runtime/shard/stages.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class PostForwardShards;

class GatheredParameters {
 public:
  // `shards` outlives this.
  explicit GatheredParameters(const UnitShards& shards)
      : shards_(shards), prepared_(shards.device(), StreamId::gather) {}
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
  const PostForwardShards* kept() const noexcept { return kept_; }

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
  void add_parts(const ParameterState& p, std::int64_t offset_bytes);
  Collective item_of(const GatheredPart& part) const;
  void make_copies();
  void note_open();
  bool fill_slot(const char* name);
  void shut_windows() noexcept;
  // Names a parameter that somebody outside still holds, empty for none.
  std::string escaped_parameter() const;

  const UnitShards& shards_;
  PreparedGroups prepared_;
  std::vector<Tensor> full_;           // what Parameter::value gives: steady steps make none
  std::vector<ShardCopy> copies_;      // into the slot
  std::vector<FlatGroup*> read_here_;  // by the gather stream
  std::vector<GatheredPart> parts_;    // that travel
  Stages<GatherStage> stages_;
  const PostForwardShards* kept_ = nullptr;  // one of these
  State state_ = State::closed;
  Slot slot_;
  Event gathered_;
  std::uint64_t gathered_version_ = 0;
};

}  // namespace tessera::shard
