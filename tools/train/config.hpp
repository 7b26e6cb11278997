// What a run of tessera-train is told: typed fields with their defaults, and the functions that
// read, check and print them. Names are torchtitan's (0.2.2) where the meaning is the same. The one
// table that connects names with fields is in schema.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/data/token_file.hpp"
#include "tessera/detail/device/machine.hpp"
#include "tessera/nn/fp8.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/optim/schedule.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::train {

enum class ModelName : std::uint8_t { llama, gpt2 };
enum class OptimizerName : std::uint8_t { adamw, sgd, muon };
// Which micro-batches of a step are reduced, see shard/runtime_control.hpp.
enum class GradientSync : std::uint8_t { always, last, all_reduce_last };
// Of kMachines, in its order, after `none`.
enum class MachineName : std::uint8_t { none, h100, h200, b200, a100 };
// See nn::LossOrder; automatic: what fits the memory.
enum class LossChoice : std::uint8_t { automatic, lean, fast };
enum class Strategy : std::uint8_t { none, ddp, zero1, zero2, zero3, hybrid };
// Of Fp8Recipe, in its order, after `none`.
enum class Float8Recipe : std::uint8_t { none, tensorwise, blockwise };
enum class RecomputeMode : std::uint8_t { none, selective, full };
enum class AsyncMode : std::uint8_t { disabled, async };

// An empty text and an empty optional mean "not set".
struct Config {
  // Flags without a section, on the command line only.
  struct Flags {
    std::optional<std::int64_t> ranks;    // as threads of this process
    std::optional<std::int64_t> emulate;  // the first rank of a world of so many, without peers
    std::optional<std::int64_t> threads;  // per rank; unset: World decides
    std::string device = "cpu";           // or "cuda", "cuda:1"
    bool dry_run = false;
    MachineName machine = MachineName::none;  // whose times a plan has
    std::optional<std::int64_t> gpus_per_machine;
    double machine_efficiency = 1;
    WireAlgorithm machine_wire = WireAlgorithm::two_level;
    std::string load, save, trace, sample;
    std::int64_t sample_tokens = 200;
    bool where = false, print_config = false, help = false, version = false;
    std::string help_of;  // all, flags or a section; empty: what people use first
  } flags;

  // Of a GPU.
  struct DeviceSection {
    CudaMemory memory = CudaMemory::pieces;
    std::string module;  // the driver module's file
    bool tf32 = false;   // f32 products round their operands
  } device;

  static constexpr nn::LlamaConfig kModel{};  // whose defaults GPT-2 shares
  struct Model {
    ModelName name = ModelName::llama;
    std::int64_t dim = kModel.dim, n_layers = kModel.n_layers, n_heads = kModel.n_heads,
                 vocab_size = kModel.vocab_size;
    std::optional<std::int64_t> n_kv_heads, ffn_dim, max_seq_len;
    double rope_theta = kModel.rope_theta, norm_eps = kModel.norm_eps,
           dropout = nn::Gpt2Config{}.dropout;
    std::optional<bool> tie_embeddings;
    nn::Projections projections = kModel.projections;

    // The fields above with the values that stand in for unset ones.
    std::int64_t kv_heads() const { return n_kv_heads.value_or(n_heads); }
    std::int64_t positions() const {  // GPT-2
      return max_seq_len.value_or(nn::Gpt2Config{}.max_seq_len);
    }
    std::int64_t ffn() const {
      return ffn_dim.value_or(name == ModelName::llama ? nn::LlamaConfig::default_ffn_dim(dim)
                                                       : 4 * dim);
    }
    bool tied() const { return tie_embeddings.value_or(name == ModelName::gpt2); }
  } model;

  struct Data {
    std::string path;
    data::SampleOrder order = data::SampleOrder::shuffled;
    double heldout = 0;
  } data;

  struct Training {
    std::int64_t steps = 1000, seq_len = 128;
    std::optional<std::int64_t> global_batch_size, local_batch_size;
    double max_norm = 1.0;
    bool stop_on_nan = true;
    DType mixed_precision_param = f32, mixed_precision_reduce = f32;
    bool enable_cpu_offload = false, captured_step = false;
    LossChoice loss = LossChoice::automatic;
  } training;

  struct MemorySection {
    std::optional<std::int64_t> limit;  // bytes of a rank; unset: a GPU's own; none: not known
  } memory;

  static constexpr optim::AdamWOptions kAdamW{};
  static constexpr optim::SGDOptions kSGD{};
  struct Optimizer {
    OptimizerName name = OptimizerName::adamw;
    double lr = 8e-4;  // torchtitan's
    double beta1 = kAdamW.beta1, beta2 = kAdamW.beta2, eps = kAdamW.eps,
           weight_decay = kAdamW.weight_decay;
    std::optional<double> momentum;
    std::optional<bool> nesterov;
    double dampening = kSGD.dampening;
    std::string no_decay;  // kinds of parameters, with commas between them
    // Of Muon.
    static constexpr optim::MuonOptions kMuon{};
    std::int64_t ns_steps = kMuon.ns_steps;
    DType ns_dtype = kMuon.ns_dtype;
    optim::MuonRate adjust_lr_fn = kMuon.adjust_lr;
    double adamw_lr_factor = kMuon.others.lr_factor;

    bool has_nesterov() const {
      return nesterov.value_or(name == OptimizerName::sgd ? kSGD.nesterov : kMuon.nesterov);
    }
    optim::SGDOptions sgd() const {
      return {.lr = lr,
              .momentum = momentum.value_or(kSGD.momentum),
              .dampening = dampening,
              .weight_decay = weight_decay,
              .nesterov = has_nesterov()};
    }
    optim::MuonOptions muon() const {
      return {.lr = lr,
              .momentum = momentum.value_or(kMuon.momentum),
              .nesterov = has_nesterov(),
              .weight_decay = weight_decay,
              .ns_steps = static_cast<int>(ns_steps),
              .ns_dtype = ns_dtype,
              .adjust_lr = adjust_lr_fn,
              .others = {.lr_factor = adamw_lr_factor,
                         .beta1 = beta1,
                         .beta2 = beta2,
                         .eps = eps,
                         .weight_decay = weight_decay}};
    }
  } optimizer;

  // See optim::lr_factor, which is the factor on lr.
  struct LrScheduler {
    std::int64_t warmup_steps = optim::Schedule{}.warmup_steps;
    optim::DecayType decay_type = optim::Schedule{}.decay_type;
    std::optional<double> decay_ratio;
    double min_lr_factor = optim::Schedule{}.min_lr_factor;
  } lr_scheduler;

  struct Parallelism {
    Strategy strategy = Strategy::none;
    std::int64_t data_parallel_replicate_degree = 1;
    std::optional<std::int64_t> data_parallel_shard_degree;  // unset: the ranks that are left
    Reshard fsdp_reshard_after_forward = Reshard::automatic;
    bool fsdp_reshard_after_backward = true;
    GradientSync fsdp_gradient_sync = GradientSync::always;
  } parallelism;

  struct ActivationCheckpoint {
    RecomputeMode mode = RecomputeMode::none;
    std::string selective_ac_option = "2";  // every so-manieth block; or op, every_op

    // Throws: DataError for another option.
    nn::Recompute recompute() const;
  } activation_checkpoint;

  struct Float8 {
    Float8Recipe recipe_name = Float8Recipe::none;
    std::string filter_fqns;  // parts of layers' names, with commas between them

    bool is_on() const { return recipe_name != Float8Recipe::none; }
    // nn::set_fp8 as these keys say.  Throws: DataError for a filter that is in no layer's name,
    // and where no layer is left.
    void apply(nn::Module& model) const;
  } float8;

  struct Checkpoint {
    DType export_dtype = f32;  // of --save
    bool enable = false;
    std::string folder = "checkpoint", initial_load_path;
    std::int64_t interval = 500,
                 load_step = -1,       // -1: the newest
        keep_latest_k = 10;            // 0: all
    std::string exclude_from_loading;  // of "optimizer" and "dataloader", with commas
    bool enable_first_step_checkpoint = false, load_only = false;
    AsyncMode async_mode = AsyncMode::disabled;

    // Whether the run holds memory for saves that it does not wait for.
    bool stages() const { return enable && !load_only && async_mode == AsyncMode::async; }
  } checkpoint;

  struct Debug {
    std::int64_t seed = 0;
    ExecutorKind executor = ExecutorKind::threaded;
    std::int64_t delay_seed = 0;  // of a GPU's random delays; 0: none
    bool deterministic = true;
  } debug;

  struct Metrics {
    std::int64_t log_freq = 1;
    std::string jsonl;
    std::optional<double> peak_tflops;  // of one rank
    bool nvtx = false;
  } metrics;

  struct Validation {
    std::int64_t freq = 0;  // 0: at the end only
  } validation;

  struct Comm {
    std::int64_t train_timeout_seconds = static_cast<std::int64_t>(WorldOptions{}.timeout_seconds),
                 heartbeat_timeout_seconds =  // 0: never
                 static_cast<std::int64_t>(WorldOptions{}.heartbeat_timeout_seconds),
                 init_timeout_seconds =
                     static_cast<std::int64_t>(WorldOptions{}.init_timeout_seconds);
    bool ordered_sums = false, windows = false;
    GatherPolicy gather_policy = GatherPolicy::standard;
    std::int64_t reduce_max_ctas = 0;  // 0: as NCCL wants; -1: measured
    std::string flight_record = "flight_record.json";
  } comm;

  // The ranks of the world, where a job has `job_ranks` (see job_size).
  int world_size(int job_ranks) const {
    return flags.emulate ? static_cast<int>(*flags.emulate) : job_ranks;
  }

  std::string file;             // the configuration file, empty without one
  std::set<std::string> given;  // the full names of what was set, by file or command line
  std::set<std::string> typed;  // those of the command line
};

// Reads `[FILE.toml] [--key=value | --key value ...]` in order, later wins; stops at --help or
// --version. Throws: DataError with one line that names the argument or the file's line, the value
// and the remedy.
Config parse_arguments(const std::vector<std::string>& arguments);

// Checks what no single value shows: that keys fit each other, the model and a world of
// `world_size` ranks (0: not known yet; what depends on it is left out, and train() checks again).
// Throws: DataError.
void validate(const Config& config, int world_size);

// Where the ranks compute, as `--device` and its section say.  Throws: DataError for another name.
DeviceChoice device_choice(const Config& config);
NcclOptions nccl_options(const Config& config);

// How a global batch is shared: global = world * local * micro_batches.
struct BatchSplit {
  std::int64_t global = 0;         // samples a step over all ranks
  std::int64_t local = 0;          // samples of one rank in one micro-batch
  std::int64_t micro_batches = 0;  // whose gradients accumulate
};

// Unset: local is global / world; global is local * world, or 24 rounded up to a multiple of the
// world. Throws: DataError if world * local does not divide global.
BatchSplit split_batch(const Config& config, int world_size);

// The same with what parallelism.strategy stands for on so many ranks in its section's other keys.
// Throws: DataError for a key that was given and contradicts it.
Config apply_strategy(const Config& config, int world_size);
// Whether a strategy says what a key is that nobody has given: printed, it would contradict that.
bool is_left_to_strategy(const std::string& key, const Config& config);
// "strategy zero2: data_parallel_replicate_degree=1, ...", empty for none. Throws: as that.
std::string describe_strategy(const Config& config, int world_size);

// Over how many ranks parameters are sharded, how many times. Throws: DataError.
HybridSizes mesh_sizes(const Config& config, int world_size);

// All sections as TOML that parse_arguments reads back to the same values; unset keys are comments
// that say what stands in.
std::string print_config(const Config& config);

// What --help prints: a screen of what people use first; all options; or those of "flags" or of a
// section.
std::string help_text(std::string_view of = {});

}  // namespace tessera::train
