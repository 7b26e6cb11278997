// A tiny Llama in training, on any world and with any options: what the promises are checked on.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tests/promises/cells.hpp"
#include "tests/promises/decisions.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {

inline nn::Recompute recompute_of(const Cell& cell) {
  if (!cell.recomputes) return nn::Recompute::none;
  if (!cell.selectively) return {.every = cell.every};
  return {.every = cell.every, .keep = {.products = 2, .attention = true}};
}

// 13 rows of the vocabulary are uneven on 2, 3 and 4 ranks.
inline nn::LlamaConfig llama_config(const Cell& cell) {
  return {.dim = 12,
          .n_layers = cell.layers,
          .n_heads = 2,
          .n_kv_heads = 1,
          .ffn_dim = 20,
          .vocab_size = 13,
          .max_seq_len = 8,
          .tie_embeddings = cell.tied,
          .projections = cell.fused ? nn::Projections::fused : nn::Projections::separate,
          .recompute = recompute_of(cell)};
}

// Blocks two by two.
inline void list_blocks(nn::Llama& model, const ShardOptions& options) {
  for (std::size_t i = 0; i + 1 < model.blocks.size(); i += 2)
    fully_shard({&model.blocks[i], &model.blocks[i + 1]}, options);
}

class Trainee {
 public:
  static constexpr std::int64_t kSamples = 36, kLength = 6;  // of a global batch

  Trainee(const World& world, const Cell& cell, std::uint64_t seed)
      : world_(world), cell_(cell), seed_(seed), model_(llama_config(cell)) {
    model_.set_loss_chunk(cell.loss_chunk);
    if (cell.freezes) freeze_parts(model_);
    if (cell.encodes)
      for (Parameter p : model_.parameters())
        if (p.shape().ndim() == 2) p.set_gather_transform(gather_in_e4m3());
    if (cell.ragged)
      for (const auto& block : model_.blocks)
        for (const Parameter& p : block.parameters())
          if (p.shape().ndim() == 2) p.set_block_rows(5);
    std::vector<Parameter> gains;
    if (cell.stored) gains = add_bases(model_, *cell.stored);
    if (cell.ignores) ignored_ = gains;
    const DeviceMesh mesh = mesh_of(world, cell.replicas, cell.backwards);
    ShardOptions options{
        .mesh = mesh,
        .precision = {.param = cell.param, .reduce = cell.reduce, .output = cell.output},
        .reshard_after_forward = reshard_on(mesh, cell.reshard),
        .prefetch_depth = cell.prefetch_depth,
        .reductions_in_flight = cell.reductions_in_flight,
        .slice_bytes = cell.slice_bytes,
        .slices_wait = cell.param == bf16,
        .piece_bytes = cell.piece_bytes,
        .packed_bytes = 64,  // gains and norms, no matrices
        .offload = cell.offload,
        .ignored = ignored_};
    if (cell.by_hand) options.shard_placement_fn = by_columns(mesh);
    if (cell.inner) add_inner_units(model_, options);
    if (cell.lists) list_blocks(model_, options);
    for (nn::Module* part : model_.parts()) {
      if (part->hook()) continue;
      // The norm behind the last block is no unit, and casts nothing.
      const bool is_last = part == &model_.blocks[model_.blocks.size() - 1];
      options.precision.output = is_last ? std::nullopt : cell.output;
      fully_shard(*part, options);
    }
    shard_around(model_, options, cell.roots);
    if (cell.by_hand) decide_by_hand(model_, world);
    model_.materialize(world.device());
    nn::init(model_, {seed});
    // As large as lr: an update follows its gradient smoothly, also where that is all rounding.
    const optim::AdamWOptions adamw{.lr = 1e-2, .eps = 1e-2};
    if (cell.orthogonalises) {
      const auto [matrices, others] = optim::split_for_muon(model_.parameters());
      optimizer_ = std::make_unique<optim::Muon>(
          matrices, others, optim::MuonOptions{.lr = 1e-2, .turn_bytes = 1000});
    } else {
      optimizer_ = std::make_unique<optim::AdamW>(model_.parameters(), adamw);
    }
    optimizer_->prepare();
    // Small enough for f16, and raised once in three steps.
    if (cell.scales_loss)
      scaler_.emplace(world.device(),
                      optim::GradScalerOptions{.init_scale = 256, .growth_interval = 2});
    for (nn::Module* root : roots_of(model_)) shard_plan(*root);
  }

  struct Scalars {
    Tensor loss, norm;  // f32 [], of this rank's samples and of all gradients
  };
  // A whole step; queued, not awaited. Gradients are dropped at its end, or at the next one's
  // start; before they are clipped `see` may look at them.
  Scalars step(int k, const std::function<void()>& see = {}) {
    if (cell_.changes) change_before_step(model_, k);
    if (cell_.keeps_gradients) optimizer_->zero_grad();
    Scalars out;
    for (int m = 0; m < cell_.micro_batches; ++m) {
      Tensor loss = backward(k, m);
      const NoGradGuard values_only;
      out.loss = out.loss.defined() ? raw::add(out.loss, loss) : loss;
    }
    average(ignored_, world_);
    if (scaler_) scaler_->unscale(*optimizer_);
    if (see) see();
    out.norm =
        optim::clip_grad_norm(model_.parameters(), 1.0, optim::NormType::l2,
                              cell_.is_fast ? optim::Clip::in_optimizer : optim::Clip::in_place);
    scaler_ ? scaler_->step(*optimizer_) : optimizer_->step();
    if (scaler_) scaler_->update();
    if (!cell_.keeps_gradients) optimizer_->zero_grad();
    return out;
  }
  // Forward and backward of one micro-batch: the loss of this rank's part, without history.
  Tensor backward(int k, int m) {
    begin_micro_batch(model_, cell_.accumulation, m + 1 == cell_.micro_batches);
    if (cell_.by_hand && k > 0) decide_before_forward(model_);
    const Tensor loss = forward(k, m) / cell_.micro_batches;
    if (cell_.by_hand) decide_before_backward(model_);
    (scaler_ ? scaler_->scale(loss) : loss).backward();
    return loss.detach();
  }
  // The loss of samples that nothing is learned from.
  double evaluate(int k) {
    const NoGradGuard values_only;
    model_.eval();
    const Tensor loss = forward(k, 0);
    model_.train();
    return world_.sum(loss.item(0.0));
  }
  // Every rank reads all parameters, one after another.
  void save() {
    for_each_full_parameter(model_, [&](const std::string&, const Tensor& full) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(full.numel()) *
                                   size_bytes(full.dtype()));
      world_.device().runs_bodies() ? full.to_bytes(bytes) : full.plan_to_bytes();
    });
  }

  nn::Llama& model() noexcept { return model_; }
  optim::Optimizer& optimizer() noexcept { return *optimizer_; }
  Memory& memory() const { return Memory::of(world_.device()); }
  // Of shards, gradients and moments.
  Memory& shard_memory() const {
    return cell_.offload == Offload::cpu ? memory().host() : memory();
  }

 private:
  Tensor forward(int k, int m) {
    const std::int64_t rows = kSamples / world_.size() / cell_.micro_batches;
    const std::int64_t first = world_.rank() * (kSamples / world_.size()) + m * rows;
    std::vector<std::int32_t> tokens, targets;
    for (std::int64_t r = first; r < first + rows; ++r) {
      std::mt19937_64 engine(seed_ * 7919 + static_cast<std::uint64_t>(k * kSamples + r));
      std::int32_t before = static_cast<std::int32_t>(engine() % 13);
      for (std::int64_t t = 0; t < kLength; ++t) {
        tokens.push_back(before);
        before =
            static_cast<std::int32_t>((before * 3 + static_cast<std::int32_t>(engine() % 2)) % 13);
        targets.push_back(before);
      }
    }
    const auto upload = [&](const std::vector<std::int32_t>& values) {
      const OwnerGuard owner(world_.device(), "batch");
      return Tensor::from(values, {rows, kLength}, world_.device());
    };
    nn::LossOrder order;
    if (cell_.is_fast) order.gradient = 1.0 / cell_.micro_batches;
    return model_.loss(upload(tokens), upload(targets), order);
  }

  const World& world_;
  Cell cell_;
  std::uint64_t seed_;
  nn::Llama model_;
  std::vector<Parameter> ignored_{};
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<optim::GradScaler> scaler_{};
};

// What a training leaves, equal on all ranks: per step the mean loss and the norm, the gradients of
// the first step, and the parameters.
struct Trained {
  std::vector<float> losses, norms;
  Values gradients, parameters;
};
inline bool same_bits(const Trained& a, const Trained& b) {
  return same_bits(a.losses, b.losses) && same_bits(a.norms, b.norms) &&
         same_bits(a.gradients, b.gradients) && same_bits(a.parameters, b.parameters);
}

// Whole; a parameter that units leave alone has its own. Collective.
inline Values full_gradients(const nn::Module& model) {
  Values gradients;
  for (const auto& [name, p] : model.named_parameters())
    if (p.trainable())
      gradients[name] = (p.unit() ? p.distributed_grad().full() : p.grad()).to_vector<float>();
  return gradients;
}

// The largest |a - b|; infinite where there is nothing to compare.
inline double worst(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() && !a.empty() ? 0 : INFINITY;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

inline Trained train(World& world, Trainee& trainee, int steps) {
  Trained trained;
  for (int k = 0; k < steps; ++k) {
    const auto see = [&] { trained.gradients = full_gradients(trainee.model()); };
    const Trainee::Scalars scalars = k == 0 ? trainee.step(k, see) : trainee.step(k);
    trained.losses.push_back(static_cast<float>(world.sum(scalars.loss.item()) / world.size()));
    trained.norms.push_back(static_cast<float>(scalars.norm.item()));
  }
  trained.parameters = full_values(trainee.model());
  return trained;
}
inline Trained train(World& world, const Cell& cell, std::uint64_t seed, int steps) {
  Trainee trainee(world, cell, seed);
  return train(world, trainee, steps);
}

// The length of a - b, of all parameters together; infinite where these differ.
inline double distance_of(const Values& a, const Values& b) {
  double sum = 0;
  if (a.size() != b.size()) return INFINITY;
  for (const auto& [name, x] : a) {
    const auto y = b.find(name);
    if (y == b.end() || y->second.size() != x.size()) return INFINITY;
    for (std::size_t i = 0; i < x.size(); ++i)
      sum += std::pow(static_cast<double>(x[i]) - y->second[i], 2);
  }
  return std::sqrt(sum);
}

// On all ranks; every rank must come to the same.
inline Trained train(int ranks, const WorldOptions& options, const Cell& cell, std::uint64_t seed,
                     int steps) {
  const auto all =
      on_ranks(ranks, options, [&](World& world) { return train(world, cell, seed, steps); });
  for (const Trained& other : all) CHECK(same_bits(all[0], other));
  return all[0];
}

}  // namespace tessera::testing
