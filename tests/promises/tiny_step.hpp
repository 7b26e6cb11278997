// A training so small that thousands of schedules of it fit into a minute, and all that it leaves:
// what `schedules` tries seeds on. No test framework here.
//
// Four wide, so that on 3 ranks the norms give two rows to ranks 0 and 1 and none to rank 2; 5 rows
// of vocabulary are uneven on 2 and on 3.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

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
#include "tests/promises/tiny_configs.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {

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
        .packed_bytes = 64,  // gains and norms, no matrices
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
    shard_around(model_, options, config.roots);
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
};

// Shuffled runs are poisoned; `mutation` takes an edge from rank 0, which `observer` watches.
inline TinyRun train(const TinyConfig& config, const WorldOptions& options, std::uint64_t data_seed,
                     const Mutation& mutation = {}, Observer* observer = nullptr) {
  TinyRun run;
  run.bits.resize(static_cast<std::size_t>(config.ranks));
  run_local(config.ranks, options, [&](World& world) {
    if (options.executor.make_scheduler) Memory::of(world.device()).poison_freed();
    if (world.rank() == 0) {
      Mutator::install(world.device().context(), mutation);
      if (observer) world.device().context().add_observer(*observer);
    }
    run.bits[static_cast<std::size_t>(world.rank())] = TinyStep(world, config, data_seed).train();
  });
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
