#include "tools/train/trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/norm.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tessera/shard/shard_plan.hpp"

namespace tessera::train {
namespace {

// The parameters of the kinds that `kinds` names. A table that is the head, too, is an embedding.
std::vector<Parameter> without_decay(nn::Module& model, std::string_view kinds) {
  const auto is_named = [kinds](std::string_view kind) {
    return kinds.find(kind) != std::string_view::npos;  // none is a part of another
  };
  std::vector<Parameter> found;
  for (const auto& [path, module] : model.named_modules()) {
    const bool is_norm = dynamic_cast<nn::RMSNorm*>(module) || dynamic_cast<nn::LayerNorm*>(module);
    const bool is_table = dynamic_cast<nn::Embedding*>(module) != nullptr;
    for (const auto& [name, parameter] : module->own_parameters())
      if ((is_norm && is_named("norms")) || (is_table && is_named("embeddings")) ||
          (name == "bias" && is_named("biases")))
        found.push_back(parameter);
  }
  return found;
}

double learning_rate(const Config& c, std::int64_t step) {
  const auto& s = c.lr_scheduler;
  return c.optimizer.lr * optim::lr_factor({.steps = c.training.steps,
                                            .warmup_steps = s.warmup_steps,
                                            .decay_ratio = s.decay_ratio,
                                            .decay_type = s.decay_type,
                                            .min_lr_factor = s.min_lr_factor},
                                           step);
}

// Values of this rank's step that all ranks agree on with one sum, in their place.
void all_sum(const World& world, const Tensor& values) {
  if (world.size() == 1) return;
  const Access accesses[] = {values.access(AccessMode::write)};
  world.control().submit(Collective{.send = values.data(),
                                    .recv = values.data(),
                                    .count = values.numel(),
                                    .kind = CollectiveKind::all_reduce,
                                    .dtype = values.dtype()},
                         "all_reduce_step", accesses);
}

std::unique_ptr<nn::LanguageModel> plain_model(const Config& config) {
  const auto& m = config.model;
  const nn::Recompute recompute = config.activation_checkpoint.recompute();
  if (m.name == ModelName::llama)
    return std::make_unique<nn::Llama>(
        nn::LlamaConfig{.dim = m.dim,
                        .n_layers = m.n_layers,
                        .n_heads = m.n_heads,
                        .n_kv_heads = m.kv_heads(),
                        .ffn_dim = m.ffn(),
                        .vocab_size = m.vocab_size,
                        .max_seq_len = m.max_seq_len.value_or(config.training.seq_len),
                        .rope_theta = m.rope_theta,
                        .norm_eps = m.norm_eps,
                        .tie_embeddings = m.tied(),
                        .projections = m.projections,
                        .recompute = recompute});
  return std::make_unique<nn::Gpt2>(nn::Gpt2Config{.dim = m.dim,
                                                   .n_layers = m.n_layers,
                                                   .n_heads = m.n_heads,
                                                   .ffn_dim = m.ffn(),
                                                   .vocab_size = m.vocab_size,
                                                   .max_seq_len = m.positions(),
                                                   .norm_eps = m.norm_eps,
                                                   .dropout = m.dropout,
                                                   .tie_embeddings = m.tied(),
                                                   .recompute = recompute});
}

}  // namespace

std::unique_ptr<nn::LanguageModel> make_model(const Config& config) {
  auto model = plain_model(config);
  config.float8.apply(*model);
  return model;
}

double flops_per_token(const Config& config, nn::LanguageModel& model) {
  const auto& m = config.model;
  std::int64_t weights =
      model.numel() - (m.tied() ? 0 : m.vocab_size * m.dim);  // a look-up multiplies nothing
  if (m.name == ModelName::gpt2) weights -= m.positions() * m.dim;
  return 6.0 * static_cast<double>(weights) + 12.0 * static_cast<double>(m.n_layers * m.dim) *
                                                  static_cast<double>(config.training.seq_len);
}

Trainer::Trainer(const Config& given, const World& world)
    : config_(apply_strategy(given, world.size())),
      world_(world),
      split_(split_batch(config_, world.size())),
      model_(make_model(config_)) {
  const Config& config = config_;
  if (config.training.captured_step && world.kind() == WorldKind::local && world.size() > 1)
    throw DataError(
        "training.captured_step=true: ranks that are threads meet on the host in every collective; "
        "use --ranks 1, or leave captured_step out");
  const HybridSizes sizes = mesh_sizes(config, world.size());
  ShardOptions options{.mesh = sizes.replicate == 1 ? DeviceMesh::flat(world)
                                                    : DeviceMesh::hybrid(world, sizes)};
  options.reshard_after_forward = config.parallelism.fsdp_reshard_after_forward;
  if (config.training.mixed_precision_param != f32)
    options.precision.param = config.training.mixed_precision_param;
  if (config.training.mixed_precision_reduce != f32)
    options.precision.reduce = config.training.mixed_precision_reduce;
  if (config.training.enable_cpu_offload) options.offload = Offload::cpu;
  for (nn::Module* part : model_->parts()) fully_shard(*part, options);
  fully_shard(*model_, options);
  set_reshard_after_backward(*model_, config.parallelism.fsdp_reshard_after_backward);
  model_->materialize(world.device());
  parameters_ = model_->parameters();
  const auto& o = config.optimizer;
  if (o.name == OptimizerName::adamw)
    optimizer_ = std::make_unique<optim::AdamW>(
        parameters_, optim::AdamWOptions{.lr = o.lr,
                                         .beta1 = o.beta1,
                                         .beta2 = o.beta2,
                                         .eps = o.eps,
                                         .weight_decay = o.weight_decay});
  else if (o.name == OptimizerName::sgd)
    optimizer_ = std::make_unique<optim::SGD>(parameters_, o.sgd());
  else {
    const auto [matrices, others] = optim::split_for_muon(parameters_);
    optimizer_ = std::make_unique<optim::Muon>(matrices, others, o.muon());
  }
  set_rates();
  optimizer_->prepare();
  const auto tokens = static_cast<std::size_t>(split_.local * config.training.seq_len);
  inputs_.resize(tokens);
  targets_.resize(tokens);
  shard_plan(*model_);  // fixes the slots, on every rank at the same point
}

std::vector<checkpoint::Part> Trainer::parts() {
  return {checkpoint::part(*model_, world_), checkpoint::part(*optimizer_, *model_, world_)};
}

void Trainer::set_rates() {
  const auto& o = config_.optimizer;
  optimizer_->set_weight_decay(parameters_, o.weight_decay);
  optimizer_->set_weight_decay(without_decay(*model_, o.no_decay), 0);
  if (o.name == OptimizerName::muon)
    optimizer_->set_lr_factor(optim::split_for_muon(parameters_).others, o.adamw_lr_factor);
}

PhaseMemory Trainer::phase_memory() const {
  PhaseMemory now{memory().ledger().peak_bytes(), memory().reserved_bytes()};
  if (!memory().has_host()) return now;
  now.host_peak_bytes = memory().host().ledger().peak_bytes();
  now.host_reserved_bytes = memory().host().reserved_bytes();
  return now;
}

void Trainer::reset_peaks() const {
  memory().ledger().reset_peak();
  if (memory().has_host()) memory().host().ledger().reset_peak();
}

Trainer::MicroBatch Trainer::from_host(std::int64_t step, const FillBatch& fill) {
  return [this, step, &fill](std::int64_t row) {
    const Device& device = world_.device();
    fill(step, row, inputs_, targets_);
    const OwnerGuard owner(device, "batch");
    const Shape shape{split_.local, config_.training.seq_len};
    return std::pair(Tensor::from(inputs_, shape, device), Tensor::from(targets_, shape, device));
  };
}

Tensor Trainer::accumulate(const MicroBatch& batch) {
  Tensor total;
  for (std::int64_t micro = 0; micro < split_.micro_batches; ++micro) {
    const std::int64_t row = micro * split_.local;
    const bool is_last = micro + 1 == split_.micro_batches;
    if (config_.parallelism.fsdp_gradient_sync == GradientSync::last)
      set_requires_gradient_sync(*model_, is_last);
    if (config_.parallelism.fsdp_gradient_sync == GradientSync::all_reduce_last)
      set_requires_all_reduce(*model_, is_last);
    // Dropout's mask of a sample depends on the seed, the step and the sample's position in the
    // global batch only.
    autograd::random_state().draws = 0;
    autograd::random_state().first_row = world_.rank() * (split_.global / world_.size()) + row;
    const auto micro_batches = static_cast<double>(split_.micro_batches);
    nn::LossOrder order;
    if (config_.training.loss == LossChoice::fast) order.gradient = 1 / micro_batches;
    const auto [tokens, targets] = batch(row);
    Tensor loss = model_->loss(tokens, targets, order);
    if (micro_batches > 1) loss = loss / micro_batches;
    const NoGradGuard values_only;
    total = total.defined() ? raw::add(total, loss.detach()) : loss.detach();
    loss.backward();
  }
  return total;
}

Tensor Trainer::forward_and_backward(const MicroBatch& batch, const Tensor& own) {
  const Tensor total = accumulate(batch);
  const Tensor norm =
      raw::moved(optim::clip_grad_norm(parameters_, config_.training.max_norm, optim::NormType::l2,
                                       optim::Clip::in_optimizer),
                 world_.device());
  const Tensor parts[] = {raw::reshape(total, {1}), own, raw::reshape(norm, {1})};
  const Tensor values = raw::cat(parts, 0);
  all_sum(world_, raw::slice(values, 0, 0, 3));
  return values;
}

Tensor Trainer::run_captured(std::int64_t step, const FillBatch& fill, const Tensor& own) {
  if (!captured_)
    captured_.emplace(world_.device(), [this](const std::vector<Tensor>& in) {
      const auto rows = [&](std::int64_t row) {
        const auto part = [&](const Tensor& t) {
          return raw::slice(t, 0, row, row + split_.local);
        };
        return std::pair(part(in[0]), part(in[1]));
      };
      const Tensor values = forward_and_backward(rows, in[2]);
      optimizer_->step();
      optimizer_->zero_grad();
      return std::vector{values};
    });
  std::vector<Tensor> inputs, targets;
  const MicroBatch host = from_host(step, fill);
  for (std::int64_t micro = 0; micro < split_.micro_batches; ++micro) {
    const auto [tokens, wanted] = host(micro * split_.local);
    inputs.push_back(tokens);
    targets.push_back(wanted);
  }
  return (*captured_)({raw::cat(inputs, 0), raw::cat(targets, 0), own})[0];
}

std::string Trainer::find_bad_parameter(std::int64_t step, const FillBatch& fill) {
  accumulate(from_host(step, fill));
  const auto parameters = model_->named_parameters();
  std::size_t first = 0;
  const auto is_finite = [](const Parameter& p) {
    const Tensor own = p.grad();
    return !own.defined() ||
           std::ranges::all_of(own.to_vector<float>(), [](float x) { return std::isfinite(x); });
  };
  while (first < parameters.size() && is_finite(parameters[first].second)) ++first;
  first = static_cast<std::size_t>(-world_.max(-static_cast<double>(first)));  // of all ranks
  optimizer_->zero_grad();
  return first < parameters.size() ? parameters[first].first : "";
}

std::string Trainer::captured_steps(std::int64_t of) const {
  const std::int64_t replays = captured_ ? captured_->replays() : 0;
  return concat("captured step: ", replays, " of ", of, " steps were one graph",
                captured_ && !captured_->why_not().empty()
                    ? concat("; the last was not: ", captured_->why_not())
                    : "");
}

StepResult Trainer::step(std::int64_t step, const FillBatch& fill, bool stop, double saving) {
  const Device& device = world_.device();
  DeviceContext& context = device.context();
  reset_peaks();
  const auto begin = std::chrono::steady_clock::now();
  // A GPU measures its waits once somebody asks for them.
  const auto waited_seconds = [&] {
    return config_.metrics.jsonl.empty() || config_.training.captured_step
               ? -1
               : context.executor().waited_seconds(StreamId::compute);
  };
  const double blocked = context.blocked_seconds(), waited = waited_seconds();

  StepResult result;
  result.lr = learning_rate(config_, step);
  autograd::random_state().seed =
      fnv1a(static_cast<std::uint64_t>(step),
            fnv1a(static_cast<std::uint64_t>(config_.debug.seed), fnv1a("step")));
  const Tensor own =
      Tensor::from(std::vector{stop ? 1.0f : 0.0f, static_cast<float>(saving)}, {2}, device);
  const bool captures = config_.training.captured_step;
  if (captures) optimizer_->set_lr(result.lr);
  const Tensor values =
      captures ? run_captured(step, fill, own) : forward_and_backward(from_host(step, fill), own);
  const std::vector<float> host = values.to_vector<float>(0);  // a plan has no values
  result.loss = static_cast<double>(host[0]) / world_.size();
  result.stop = host[1] != 0;
  result.saving = host[2];
  result.grad_norm = host[3];
  // The host reads before it updates, so that a step that has diverged leaves the weights alone.
  // An emulated rank's losses mean nothing.
  result.diverged = config_.training.stop_on_nan && world_.kind() != WorldKind::emulated &&
                    !(std::isfinite(result.loss) && std::isfinite(result.grad_norm));
  if (!captures && !result.diverged) {
    optimizer_->set_lr(result.lr);
    optimizer_->step();
  }
  if (!captures) optimizer_->zero_grad();
  if (!captures || !captured_->why_not().empty()) submitted_ = phase_memory();
  result.memory = submitted_;
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  // Only where bodies run on threads of their own is the host's time the time of submitting.
  const bool tells = context.executor().runs_ahead();
  result.host_seconds = tells ? wall.count() - (context.blocked_seconds() - blocked) : -1;
  const double now = waited_seconds();
  result.exposed_seconds = now < 0 ? -1 : now - waited;
  if (result.diverged) result.bad_parameter = find_bad_parameter(step, fill);
  return result;
}

double Trainer::heldout_loss(std::int64_t count, const FillSamples& fill) {
  const NoGradGuard no_grad;
  const std::int64_t T = config_.training.seq_len, ranks = world_.size(),
                     share = ceil_div(count, ranks);
  const std::int64_t begin = std::min(count, world_.rank() * share),
                     end = std::min(count, begin + share);
  double sum = 0;
  model_->eval();
  // Every rank makes the same calls; one without samples left looks at sample 0 and counts it
  // nothing.
  for (std::int64_t done = 0; done < share; done += split_.local) {
    const std::int64_t first = begin + done,
                       rows = std::clamp<std::int64_t>(end - first, 0, split_.local);
    const auto tokens = static_cast<std::size_t>(std::max<std::int64_t>(rows, 1) * T);
    const std::span<std::int32_t> inputs(inputs_.data(), tokens), targets(targets_.data(), tokens);
    fill(rows > 0 ? first : 0, inputs, targets);
    const Shape shape{std::max<std::int64_t>(rows, 1), T};
    const Device& device = world_.device();
    const Tensor loss =
        model_->loss(Tensor::from(std::span<const std::int32_t>(inputs), shape, device),
                     Tensor::from(std::span<const std::int32_t>(targets), shape, device));
    sum += loss.item(0.0) * static_cast<double>(rows);  // nothing runs in a plan
  }
  close_units();
  model_->train();
  return world_.sum(sum) / static_cast<double>(count);
}

PhaseMemory largest(std::span<const PhaseMemory> phases) {
  PhaseMemory most;
  for (const PhaseMemory& phase : phases)
    for (std::int64_t PhaseMemory::* number :
         {&PhaseMemory::peak_bytes, &PhaseMemory::reserved_bytes, &PhaseMemory::host_peak_bytes,
          &PhaseMemory::host_reserved_bytes})
      most.*number = std::max(most.*number, phase.*number);
  return most;
}

}  // namespace tessera::train
