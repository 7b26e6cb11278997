// A training so small that thousands of schedules of it fit into a minute, and all that it leaves:
// what `schedules` tries seeds on. No test framework here.
//
// Four wide, so that on 3 ranks the norms give two rows to ranks 0 and 1 and none to rank 2; 5 rows
// of vocabulary are uneven on 2 and on 3.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "runtime/comm/testing.hpp"
#include "runtime/device/testing.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/promises/decisions.hpp"
#include "tests/support/accumulation.hpp"
#include "tests/support/mesh.hpp"

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

class TinyStep {
 public:
  TinyStep(const World& world, const TinyConfig& config, std::uint64_t data_seed)
      : world_(world),
        config_(config),
        seed_(data_seed),
        model_({.dim = 4,
                .n_layers = config.layers,
                .n_heads = 2,
                .n_kv_heads = 1,
                .ffn_dim = 5,
                .vocab_size = kVocabulary,
                .max_seq_len = kLength,
                .tie_embeddings = config.tied,
                .recompute = config.recompute}) {
    if (config.freezes) freeze_parts(model_);
    if (config.encodes)
      for (const auto& block : model_.blocks)
        for (Parameter p : block.parameters())
          if (p.shape().ndim() == 2) p.set_gather_transform(gather_in_e4m3());
    if (config.ragged)
      for (const auto& block : model_.blocks)
        for (const Parameter& p : block.parameters())
          if (p.shape().ndim() == 2) p.set_block_rows(2);
    std::vector<Parameter> gains;
    if (config.stored) gains = add_bases(model_, *config.stored);
    if (config.ignores) ignored_ = gains;
    ShardOptions options{
        .mesh = mesh_of(world, config.replicas, config.backwards),
        .precision = {.param = config.param, .reduce = config.reduce, .output = config.output},
        .reshard_after_forward = config.reshard,
        .prefetch_depth = config.prefetch_depth,
        .reductions_in_flight = config.reductions_in_flight,
        .slice_bytes = config.slice_bytes,
        .slices_wait = config.param == bf16,
        .piece_bytes = config.piece_bytes,
        .offload = config.offload,
        .ignored = ignored_};
    if (config.by_hand) options.shard_placement_fn = by_columns(options.mesh);
    if (config.inner) add_inner_units(model_, options);
    std::vector<nn::Module*> blocks;
    for (auto& block : model_.blocks) blocks.push_back(&block);
    if (config.lists) fully_shard(blocks, options);
    for (nn::Module* part : model_.parts())
      if (!part->hook()) {
        // The norm behind the last block is no unit, and casts nothing.
        options.precision.output = part == blocks.back() ? std::nullopt : config.output;
        fully_shard(*part, options);
      }
    fully_shard(config.roots ? static_cast<nn::Module&>(model_.norm) : model_, options);
    if (config.by_hand) decide_by_hand(model_, world);
    model_.materialize(world.device());
    nn::init(model_, {data_seed});
    if (config.hooks)
      for (const auto& [name, module] : model_.named_modules())
        if (module->hook()) set_all_reduce_hook(*module, double_on_stream);
    if (config.orthogonalises) {
      const auto [matrices, others] = optim::split_for_muon(model_.parameters());
      optimizer_ = std::make_unique<optim::Muon>(matrices, others,
                                                 optim::MuonOptions{.lr = 1e-2, .turn_bytes = 1});
    } else {
      optimizer_ =
          std::make_unique<optim::AdamW>(model_.parameters(), optim::AdamWOptions{.lr = 1e-2});
    }
  }

  // The bits of this rank: the losses of all its micro-batches, the norms, and its shards.
  std::vector<std::byte> train() {
    for (int k = 0; k < config_.steps; ++k) {
      if (config_.by_hand) change_before_step(model_, k);
      for (int m = 0; m < config_.micro_batches; ++m) {
        begin_micro_batch(model_, config_.accumulation, m + 1 == config_.micro_batches);
        if (config_.by_hand && k > 0) decide_before_forward(model_);
        const Tensor loss = model_.loss(tokens(k, m, 0), tokens(k, m, 1)) / config_.micro_batches;
        if (config_.by_hand) decide_before_backward(model_);
        loss.backward();
        kept_.push_back(loss.detach());
      }
      average(ignored_, world_);
      kept_.push_back(optim::clip_grad_norm(model_.parameters(), 1.0));
      optimizer_->step();
      optimizer_->zero_grad();
      if (config_.reads_losses) world_.device().block(world_.device().compute().record());
    }
    for (const auto& [name, p] : model_.named_parameters()) kept_.push_back(p.shard());
    world_.device().synchronize();
    std::vector<std::byte> bits;
    for (const Tensor& value : kept_) {
      const auto* const data = static_cast<const std::byte*>(value.data());
      bits.insert(bits.end(), data, data + value.numel() * size_bytes(value.dtype()));
    }
    return bits;
  }

 private:
  static constexpr std::int64_t kVocabulary = 5, kLength = 3;

  Tensor tokens(int step, int micro_batch, int shift) const {
    std::mt19937 engine(static_cast<std::uint32_t>(
        seed_ * 31 + static_cast<std::uint64_t>((step * 8 + micro_batch) * 8 + world_.rank())));
    std::vector<std::int32_t> drawn(static_cast<std::size_t>(kLength) + 1);
    for (std::int32_t& token : drawn) token = static_cast<std::int32_t>(engine() % kVocabulary);
    return Tensor::from(std::vector(drawn.begin() + shift, drawn.end() - 1 + shift), {1, kLength},
                        world_.device());
  }

  const World& world_;
  TinyConfig config_;
  std::uint64_t seed_;
  nn::Llama model_;
  std::vector<Parameter> ignored_{};
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<Tensor> kept_;
};

// What a training left, and how it came to it.
struct TinyRun {
  std::vector<std::vector<std::byte>> bits;  // by rank
  std::uint64_t trace = 0;
};

// Shuffled runs are poisoned; `mutation` takes an edge from rank 0, which `observer` watches.
inline TinyRun train(const TinyConfig& config, const WorldOptions& options, std::uint64_t data_seed,
                     const Mutation& mutation = {}, Observer* observer = nullptr) {
  TinyRun run;
  run.bits.resize(static_cast<std::size_t>(config.ranks));
  run_local(config.ranks, options, [&](World& world) {
    if (options.executor == ExecutorKind::shuffled) Memory::of(world.device()).poison_freed();
    if (world.rank() == 0) {
      Mutator::install(world.device().context(), mutation);
      if (observer) world.device().context().add_observer(*observer);
    }
    run.bits[static_cast<std::size_t>(world.rank())] = TinyStep(world, config, data_seed).train();
  });
  run.trace = last_trace_hash();
  return run;
}

// One line for people: what of `got` is not as in `expected`.
inline std::string difference(const TinyRun& expected, const TinyRun& got) {
  for (std::size_t rank = 0; rank < expected.bits.size(); ++rank) {
    const auto &a = expected.bits[rank], &b = got.bits[rank];
    if (a.size() != b.size()) return concat("rank ", rank, " left ", b.size(), " bytes");
    for (std::size_t i = 0; i + 4 <= a.size(); i += 4) {
      if (std::memcmp(&a[i], &b[i], 4) == 0) continue;
      float x = 0, y = 0;
      std::memcpy(&x, &a[i], 4);
      std::memcpy(&y, &b[i], 4);
      return concat("rank ", rank, ": value ", i / 4, " of ", a.size() / 4, " is ", y, ", not ", x);
    }
  }
  return "";
}

}  // namespace tessera::testing
