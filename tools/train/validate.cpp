// The checks of tessera-train that need more than one key; see config.hpp.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "kernels/attention.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/run/run.hpp"
#include "tools/train/config.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr std::int64_t kDefaultBatch = 24;  // shared equally by 1, 2, 3, 4, 6, 8, 12 and 24 ranks
constexpr std::int64_t kMaxThreadRanks = 1024;  // beyond it the machine, not the program, gives up

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw DataError(concat(parts...));
}

void check_no_decay(const Config& config) {
  for (std::string_view left = config.optimizer.no_decay; !left.empty();) {
    const std::string_view kind = left.substr(0, left.find(','));
    if (kind != "norms" && kind != "biases" && kind != "embeddings")
      fail("optimizer.no_decay=", shortened(config.optimizer.no_decay), ": '", kind,
           "' is not norms, biases or embeddings; give these with commas between them");
    left.remove_prefix(std::min(kind.size() + 1, left.size()));
  }
}

void check_sgd(const Config& config) {
  const optim::SGDOptions sgd = config.optimizer.sgd();
  if (config.optimizer.name != OptimizerName::sgd) return;
  if (sgd.dampening != 0 && sgd.momentum == 0)
    fail("optimizer.dampening=", sgd.dampening,
         ": has no meaning without momentum; set optimizer.momentum, or leave it out");
  if (!sgd.nesterov) return;
  if (sgd.momentum == 0)
    fail("optimizer.nesterov=true: SGD has no momentum; set optimizer.momentum, e.g. to 0.9");
  if (sgd.dampening != 0)
    fail("optimizer.nesterov=true: allows no optimizer.dampening=", sgd.dampening,
         "; leave one of them out");
}

// Nothing is accepted and ignored: a key that means nothing here was meant for another run.
void check_given(const Config& config) {
  for (const std::string& name : config.given) {
    const Key* key = find_key(name);
    if (!key || applies(*key, config)) continue;
    const std::size_t equals = key->only_if.find('=');
    const bool negated = key->only_if[equals - 1] == '!';
    const std::string_view other = key->only_if.substr(0, equals - (negated ? 1 : 0));
    const Key* condition = find_key(other);
    fail(name, "=", shortened(shown_value(*key, key->get(config))), ": has no meaning with ", other,
         "=", shown_value(*condition, condition->get(config)), "; leave it out, or set ", other,
         negated ? " to something else than " : "=", key->only_if.substr(equals + 1));
  }
  for (const char* const name : {"load", "save", "sample", "metrics.jsonl"}) {
    if (!config.flags.dry_run || !config.typed.contains(name)) continue;
    const Key* key = find_key(name);
    fail(
        "--", name, "=", shortened(shown_value(*key, key->get(config))),
        ": --dry-run reads no weights, trains nothing and writes nothing but --trace; leave one of "
        "them out");
  }
  if (config.flags.machine != MachineName::none) {
    const std::string machine =
        concat("--machine=", kMachines.at(static_cast<std::size_t>(config.flags.machine) - 1).name);
    if (device_choice(config).kind == DeviceKind::cpu)
      fail(machine, ": is a GPU; add --device=cuda to plan for a GPU");
    if (config.metrics.peak_tflops)
      fail("metrics.peak_tflops=", *config.metrics.peak_tflops, ": ", machine,
           " has its own peak; leave one of them out");
  }
  if (config.training.enable_cpu_offload && config.optimizer.name == OptimizerName::muon)
    fail(
        "training.enable_cpu_offload=true: Muon moves matrices between devices; leave "
        "enable_cpu_offload out, or set optimizer.name=AdamW");
  if (config.training.captured_step) {
    const std::string key = "training.captured_step=true: ";
    if (device_choice(config).kind == DeviceKind::cpu)
      fail(key, "only a GPU can capture a step; add --device=cuda, or leave captured_step out");
    if (config.training.stop_on_nan)
      fail(key,
           "the host sees a loss after the step, but training.stop_on_nan=true needs it before the "
           "update; set training.stop_on_nan=false");
    if (config.training.enable_cpu_offload)
      fail(key, "training.enable_cpu_offload=true updates on the host; leave one of them out");
  }
  if (config.given.contains("sample-tokens") && config.flags.sample.empty()) {
    fail("--sample-tokens=", config.flags.sample_tokens, ": nothing is sampled; add --sample TEXT");
  }
  if (config.checkpoint.enable && config.flags.emulate)
    fail(
        "checkpoint.enable=true: --emulate runs one rank without its peers; leave one of them out");
  for (std::string_view rest = config.checkpoint.exclude_from_loading; !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find(','));
    if (name != "optimizer" && name != "dataloader")
      fail("checkpoint.exclude_from_loading=", config.checkpoint.exclude_from_loading, ": '", name,
           "' is not a part; name optimizer or dataloader");
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
  }
  if (config.validation.freq > 0 && config.data.heldout == 0) {
    fail("validation.freq=", config.validation.freq,
         ": no tokens are held out; set data.heldout, e.g. to 0.05");
  }
}

void check_model(const Config& config) {
  const Config::Model& model = config.model;
  const nn::Recompute recompute = config.activation_checkpoint.recompute();
  if (recompute.every > model.n_layers) {
    fail("activation_checkpoint.selective_ac_option=", recompute.every,
         ": exceeds model.n_layers=", model.n_layers,
         ", so no block is computed again; choose less, or activation_checkpoint.mode=none");
  }
  if (model.dim % model.n_heads != 0) {
    fail("model.n_heads=", model.n_heads, ": does not divide model.dim=", model.dim,
         "; choose a divisor of it");
  }
  const std::int64_t head_dim = model.dim / model.n_heads;
  if (head_dim > kernels::kAttentionMaxHeadDim) {
    fail("model.n_heads=", model.n_heads, ": leaves heads of ", head_dim,
         " channels, but attention takes at most ", kernels::kAttentionMaxHeadDim,
         "; choose more heads");
  }
  if (model.name == ModelName::llama && head_dim % 2 != 0) {
    fail("model.n_heads=", model.n_heads, ": leaves heads of ", head_dim,
         " channels, but the rotary embedding turns pairs; make model.dim / model.n_heads even");
  }
  if (model.n_heads % model.kv_heads() != 0) {
    fail("model.n_kv_heads=", model.kv_heads(), ": does not divide model.n_heads=", model.n_heads,
         "; choose a divisor of it");
  }
  if (model.name == ModelName::gpt2 && config.training.seq_len > model.positions()) {
    fail("training.seq_len=", config.training.seq_len,
         ": exceeds model.max_seq_len=", model.positions(), "; raise the one or lower the other");
  }
  for (const char c : config.flags.sample) {
    const auto id = static_cast<unsigned char>(c);
    if (id < model.vocab_size) continue;
    fail("--sample: holds byte ", int{id}, ", beyond model.vocab_size=", model.vocab_size,
         "; use other characters");
  }
}

void check_schedule(const Config& config) {
  const std::int64_t steps = config.training.steps, warmup = config.lr_scheduler.warmup_steps;
  if (steps == 0) return;
  if (warmup > steps) {
    fail("lr_scheduler.warmup_steps=", warmup, ": exceeds training.steps=", steps,
         "; choose fewer");
  }
  const double ratio = config.lr_scheduler.decay_ratio.value_or(0);
  const auto decay = static_cast<std::int64_t>(std::llround(ratio * static_cast<double>(steps)));
  if (warmup + decay > steps) {
    fail("lr_scheduler.decay_ratio=", ratio, ": decay (", decay, ") and warm-up (", warmup,
         ") exceed training.steps=", steps,
         "; lower lr_scheduler.decay_ratio or lr_scheduler.warmup_steps");
  }
}

void check_device(const Config& config) {
  const Config::Flags& flags = config.flags;
  if (device_choice(config).kind == DeviceKind::cpu) return;
  if (flags.threads) {
    fail("--threads=", *flags.threads, ": has no meaning with --device=", flags.device,
         "; leave it out");
  }
  if (config.given.contains("debug.executor")) {
    fail("debug.executor: has no meaning with --device=", flags.device, "; leave it out");
  }
}

void check_run(const Config& config, int world_size) {
  const Config::Flags& flags = config.flags;
  check_device(config);
  if (flags.ranks && *flags.ranks > kMaxThreadRanks && !flags.dry_run) {
    fail("--ranks=", *flags.ranks, ": more than ", kMaxThreadRanks,
         " ranks do not run as threads; use several processes, or --dry-run to plan");
  }
  if (flags.emulate && (flags.ranks || flags.dry_run)) {
    fail("--emulate=", *flags.emulate, ": runs one rank of a world, but ",
         flags.ranks ? "--ranks starts several" : "--dry-run plans every kind of rank",
         "; leave one of them out");
  }
  if (flags.emulate && !(flags.save.empty() && flags.sample.empty())) {
    fail("--emulate=", *flags.emulate, ": the other ranks' weights are not there to ",
         flags.save.empty() ? "sample from; leave --sample out" : "save; leave --save out");
  }
  if (flags.dry_run && world_size == 0) {
    fail(
        "--dry-run: this launcher does not say how many processes it started; leave the launcher "
        "out and give --ranks=N");
  }
  if (!flags.trace.empty() && config.training.steps == 0 && !flags.dry_run) {
    fail("--trace=", flags.trace,
         ": there is no step to trace with training.steps=0; train some, or give --dry-run");
  }
  if (flags.print_config || !config.data.path.empty() || flags.dry_run) return;
  if (config.training.steps > 0) {
    fail("data.path: not set, and training.steps=", config.training.steps,
         " need data; give --data.path=FILE, or --training.steps=0");
  }
  if (config.data.heldout > 0) {
    fail("data.heldout=", config.data.heldout, ": there is no data; give --data.path=FILE");
  }
}

void check_gradient_sync(const Config& config, const BatchSplit& split, const HybridSizes& sizes) {
  constexpr const char* kSync = "parallelism.fsdp_gradient_sync=";
  const GradientSync sync = config.parallelism.fsdp_gradient_sync;
  if (sync == GradientSync::always) return;
  const bool is_last = sync == GradientSync::last;
  if (split.micro_batches == 1)
    fail(kSync, is_last ? "last" : "all_reduce_last",
         ": a step has one micro-batch; give a smaller training.local_batch_size");
  if (!is_last && sizes.replicate == 1)
    fail(kSync,
         "all_reduce_last: there is one replica; choose last, or more by "
         "parallelism.data_parallel_replicate_degree");
}

void check_float8(const Config& config, const BatchSplit& split) {
  if (!config.float8.is_on()) return;
  if (const std::int64_t tokens = checked_mul(split.local, config.training.seq_len);
      tokens % 16 != 0) {
    fail("quantize.linear.float8.recipe_name: a micro-batch has ", tokens,
         " tokens, which 16 must divide; change training.local_batch_size or training.seq_len");
  }
  if (config.flags.machine == MachineName::none) return;
  const Machine& machine = kMachines.at(static_cast<std::size_t>(config.flags.machine) - 1);
  const bool by_block = config.float8.recipe_name == Float8Recipe::blockwise;
  if (machine.fp8_product_flops_per_second > 0 && (!by_block || machine.has_fp8_blocks)) return;
  fail("quantize.linear.float8.recipe_name=", by_block ? "blockwise" : "tensorwise",
       ": --machine=", machine.name, " has no such 8-bit products; choose another --machine",
       machine.fp8_product_flops_per_second > 0 ? ", or tensorwise" : "");
}

}  // namespace

NcclOptions nccl_options(const Config& config) {
  return {.ordered_sums = config.comm.ordered_sums,
          .windows = config.comm.windows,
          .gather_policy = config.comm.gather_policy,
          .reduce_max_ctas = static_cast<int>(config.comm.reduce_max_ctas)};
}

DeviceChoice device_choice(const Config& config) {
  DeviceChoice choice = parse_device(config.flags.device);
  choice.memory = config.device.memory;
  choice.module = config.device.module;
  choice.tf32 = config.device.tf32;
  choice.deterministic = config.debug.deterministic;
  return choice;
}

BatchSplit split_batch(const Config& config, int world_size) {
  TESSERA_EXPECT(world_size > 0, "split_batch: world_size=", world_size, " must be positive");
  const Config::Training& training = config.training;
  BatchSplit split;
  if (training.global_batch_size)
    split.global = *training.global_batch_size;
  else if (training.local_batch_size)
    split.global = checked_mul(*training.local_batch_size, world_size);
  else
    split.global = round_up(kDefaultBatch, world_size);
  if (split.global % world_size != 0) {
    fail("training.global_batch_size=", split.global, ": is not divisible by the ", world_size,
         " ranks; the nearest above is ", round_up(split.global, world_size));
  }
  const std::int64_t part = split.global / world_size;
  split.local = training.local_batch_size.value_or(part);
  if (part % split.local != 0) {
    fail("training.local_batch_size=", split.local, ": times ", world_size,
         world_size == 1 ? " rank does not divide" : " ranks does not divide",
         " training.global_batch_size=", split.global, "; choose a divisor of ", part);
  }
  split.micro_batches = part / split.local;
  return split;
}

HybridSizes mesh_sizes(const Config& given_config, int world_size) {
  constexpr const char* kReplicate = "parallelism.data_parallel_replicate_degree=";
  constexpr const char* kShard = "parallelism.data_parallel_shard_degree=";
  const Config config = apply_strategy(given_config, world_size);
  const std::int64_t replicate = config.parallelism.data_parallel_replicate_degree;
  if (world_size % replicate != 0)
    fail(kReplicate, replicate, ": does not divide the ", world_size,
         world_size == 1 ? " rank" : " ranks; choose a divisor of them");
  const std::int64_t shard =
      config.parallelism.data_parallel_shard_degree.value_or(world_size / replicate);
  if (shard * replicate != world_size)
    fail(kShard, shard, ": times ", replicate, replicate == 1 ? " replica" : " replicas",
         " is not ", world_size, ", the number of ranks; leave it out for ",
         world_size / replicate);
  const int kept_over = config.parallelism.fsdp_reshard_after_forward.ranks();
  if (kept_over > 0 && (kept_over >= shard || shard % kept_over != 0))
    fail("parallelism.fsdp_reshard_after_forward=", kept_over, ": does not split the ", shard,
         shard == 1 ? " rank" : " ranks", " that shard; give a divisor above 1 and below ", shard);
  return {.replicate = static_cast<int>(replicate), .shard = static_cast<int>(shard)};
}

void validate(const Config& config, int world_size) {
  check_given(config);
  check_model(config);
  check_schedule(config);
  check_no_decay(config);
  check_sgd(config);
  check_run(config, world_size);
  if (world_size == 0) return;
  const BatchSplit split = split_batch(config, world_size);
  check_gradient_sync(apply_strategy(config, world_size), split, mesh_sizes(config, world_size));
  check_float8(config, split);
}

}  // namespace tessera::train
