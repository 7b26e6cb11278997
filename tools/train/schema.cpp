#include "tools/train/schema.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>

#include "tessera/base/error.hpp"

namespace tessera::train {
namespace {

constexpr double kMaxSize = 1 << 24;  // dimensions and batches: their products stay far below 2^63
constexpr double kMaxCount = 1ll << 40;  // steps
constexpr double kMaxBytes = 1ll << 50;
constexpr double kMaxSeed = 1ll << 53;  // what a JSON or TOML reader elsewhere still reads exactly

constexpr Range between(double low, double high) { return {low, high, false, false}; }
constexpr Range at_least(double low) { return {.low = low}; }
constexpr Range above(double low) { return {.low = low, .above_low = true}; }
constexpr Range fraction() { return {0, 1, false, true}; }

template <class T>
struct Optional : std::false_type {
  using Type = T;
};
template <class T>
struct Optional<std::optional<T>> : std::true_type {
  using Type = T;
};

template <class T>
constexpr ValueType type_of() {
  if constexpr (std::is_same_v<T, bool>)
    return ValueType::boolean;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return ValueType::integer;
  else if constexpr (std::is_same_v<T, double>)
    return ValueType::real;
  else if constexpr (std::is_same_v<T, std::string>)
    return ValueType::text;
  else {
    static_assert(std::is_enum_v<T> || std::is_same_v<T, Reshard>);
    return ValueType::choice;
  }
}

constexpr std::array kReshards{Reshard::automatic, Reshard::always, Reshard::never};

template <class T>
Value to_value(const T& field) {
  if constexpr (Optional<T>::value)
    return field ? Value(*field) : Value();
  else if constexpr (std::is_enum_v<T>)
    return static_cast<std::int64_t>(field);
  else if constexpr (std::is_same_v<T, Reshard>)
    return field.is_partial() ? -std::int64_t{field.ranks()}
                              : std::ranges::find(kReshards, field) - kReshards.begin();
  else if constexpr (std::is_same_v<T, std::string>)
    return field.empty() ? Value() : Value(field);
  else
    return field;
}

template <class T>
void from_value(T& field, const Value& value) {
  if constexpr (std::is_enum_v<T>)
    field = static_cast<T>(std::get<std::int64_t>(value));
  else if constexpr (std::is_same_v<T, Reshard>) {
    const std::int64_t index = std::get<std::int64_t>(value);
    field = index < 0 ? Reshard::to(static_cast<int>(-index))
                      : kReshards[static_cast<std::size_t>(index)];
  } else
    field = std::get<typename Optional<T>::Type>(value);
}

// The columns that only some rows have.
struct Extra {
  Range range = {};
  std::vector<std::string_view> choices = {};
  std::string_view only_if = {}, unset = {}, argument = {};
};

// The row of "section.name", or of a flag: "name".
template <auto kSection, auto kField>
Key key(std::string_view full_name, std::string_view help, const Extra& extra = {}) {
  using Field = std::remove_cvref_t<decltype(std::declval<Config&>().*kSection.*kField)>;
  const std::size_t dot = full_name.rfind('.');
  const bool flag = dot == std::string_view::npos;
  return {.section = full_name.substr(0, flag ? 0 : dot),
          .name = full_name.substr(flag ? 0 : dot + 1),
          .help = help,
          .type = type_of<typename Optional<Field>::Type>(),
          .range = extra.range,
          .choices = extra.choices,
          .only_if = extra.only_if,
          .unset = extra.unset,
          .argument = extra.argument,
          .get = [](const Config& c) { return to_value(c.*kSection.*kField); },
          .set = [](Config& c, const Value& value) { from_value(c.*kSection.*kField, value); }};
}

constexpr std::string_view kLlama = "model.name=llama", kGpt2 = "model.name=gpt2",
                           kHasAdamw = "optimizer.name!=SGD",
                           kHasMomentum = "optimizer.name!=AdamW", kMuon = "optimizer.name=Muon",
                           kDecays = "lr_scheduler.decay_type!=constant",
                           kSaves = "checkpoint.enable=true",
                           kSelective = "activation_checkpoint.mode=selective",
                           kFloat8 = "quantize.linear.float8.recipe_name!=none",
                           kGpu = "device!=cpu", kPlanned = "dry-run=true",
                           kPriced = "machine!=none";

}  // namespace

// The choices of an enumeration stand in the order of its values.
const std::vector<Key>& schema() {
  using C = Config;
  static const std::vector<Key> rows = {
      key<&C::flags, &C::Flags::ranks>(
          "ranks", "ranks, as threads of this process (processes: mpirun, torchrun)",
          {.range = between(1, 1 << 20), .unset = "1", .argument = "N"}),
      key<&C::flags, &C::Flags::emulate>(
          "emulate",
          "run the first rank of a world of N without its peers: its time and memory, no losses",
          {.range = between(1, 1 << 20), .argument = "N"}),
      key<&C::flags, &C::Flags::threads>("threads", "threads per rank for the kernels",
                                         {.range = between(1, 4096),
                                          .unset = "cores in the affinity mask / ranks in it",
                                          .argument = "N"}),
      key<&C::flags, &C::Flags::device>(
          "device",
          "where ranks compute: cpu; cuda: rank r on GPU r, or all on the first where there are "
          "fewer GPUs; cuda:1: all on the second",
          {.argument = "DEVICE"}),
      key<&C::flags, &C::Flags::dry_run>("dry-run",
                                         "print units, shards, collectives and the planned peak; "
                                         "train nothing, open no data, write "
                                         "no metrics"),
      key<&C::flags, &C::Flags::machine>(
          "machine",
          "let the dry run predict the time of a step on GPUs of this kind (none: the trace has "
          "times of the order of a CPU's)",
          {.choices = {"none", "h100", "h200", "b200", "a100"}, .only_if = kPlanned}),
      key<&C::flags, &C::Flags::gpus_per_machine>(
          "gpus-per-machine", "how many GPUs of a machine NVLink joins",
          {.range = between(1, 1024), .only_if = kPriced, .unset = "8", .argument = "N"}),
      key<&C::flags, &C::Flags::machine_efficiency>(
          "machine-efficiency",
          "fraction that is reached of the rates of compute and memory in its table",
          {.range = {0, 2, true, false}, .only_if = kPriced, .argument = "X"}),
      key<&C::flags, &C::Flags::machine_wire>(
          "machine-wire", "how collectives cross several machines; ring: as NCCL does",
          {.choices = {"two-level", "ring"}, .only_if = kPriced}),
      key<&C::flags, &C::Flags::load>(
          "load", "start from these weights (safetensors, an index, or their folder)",
          {.argument = "FILE"}),
      key<&C::flags, &C::Flags::save>("save", "write the weights at the end", {.argument = "FILE"}),
      key<&C::flags, &C::Flags::trace>(
          "trace", "write a timeline of the first 10 steps, run or planned", {.argument = "FILE"}),
      key<&C::flags, &C::Flags::sample>("sample", "at the end, let the model continue this text",
                                        {.argument = "TEXT"}),
      key<&C::flags, &C::Flags::sample_tokens>("sample-tokens", "how many tokens --sample adds",
                                               {.range = between(1, kMaxSize), .argument = "N"}),
      key<&C::flags, &C::Flags::where>(
          "where", "print launcher, rank, store, GPUs and NCCL of each process, and end"),
      key<&C::flags, &C::Flags::print_config>("print-config",
                                              "print the whole configuration as TOML and end"),
      key<&C::flags, &C::Flags::help>(
          "help",
          "print the options that people use first and end; =all: every option, "
          "=SECTION: those of one"),
      key<&C::flags, &C::Flags::version>("version",
                                         "print version, commit, compiler and features, and end"),
      key<&C::model, &C::Model::name>("model.name", "which architecture",
                                      {.choices = {"llama", "gpt2"}}),
      key<&C::model, &C::Model::dim>("model.dim", "width of the residual stream",
                                     {.range = between(1, 1 << 20)}),
      key<&C::model, &C::Model::n_layers>("model.n_layers", "number of blocks",
                                          {.range = between(1, 4096)}),
      key<&C::model, &C::Model::n_heads>("model.n_heads", "heads of attention; must divide dim",
                                         {.range = between(1, 1 << 16)}),
      key<&C::model, &C::Model::n_kv_heads>(
          "model.n_kv_heads", "heads of keys and values; must divide n_heads",
          {.range = between(1, 1 << 16), .only_if = kLlama, .unset = "n_heads"}),
      key<&C::model, &C::Model::ffn_dim>(
          "model.ffn_dim", "width inside the MLP",
          {.range = between(1, kMaxSize),
           .unset = "llama: 8/3 of dim, rounded up to a multiple of 32; gpt2: 4 dim"}),
      key<&C::model, &C::Model::vocab_size>("model.vocab_size",
                                            "number of token ids; 256 for bytes",
                                            {.range = between(1, kMaxSize)}),
      key<&C::model, &C::Model::max_seq_len>(
          "model.max_seq_len", "number of learned positions",
          {.range = between(1, kMaxSize), .only_if = kGpt2, .unset = "1024"}),
      key<&C::model, &C::Model::rope_theta>("model.rope_theta", "base of the rotary embedding",
                                            {.range = above(0), .only_if = kLlama}),
      key<&C::model, &C::Model::norm_eps>("model.norm_eps", "added to the variance in every norm",
                                          {.range = above(0)}),
      key<&C::model, &C::Model::dropout>("model.dropout",
                                         "probability of dropout; masks are the same for any "
                                         "number of ranks where seq_len * dim is a multiple of 4",
                                         {.range = fraction(), .only_if = kGpt2}),
      key<&C::model, &C::Model::tie_embeddings>("model.tie_embeddings",
                                                "one weight for embedding and head",
                                                {.unset = "llama: false; gpt2: true"}),
      key<&C::model, &C::Model::projections>(
          "model.projections",
          "fused: one parameter for queries, keys and values, and one for gate and up, so "
          "fewer and wider products; files and initial values stay the same",
          {.choices = {"separate", "fused"}, .only_if = kLlama}),
      key<&C::data, &C::Data::path>(
          "data.path", "file of tokens, 16-bit little-endian in *.bin; bytes in all others",
          {.argument = "FILE"}),
      key<&C::data, &C::Data::order>("data.order", "order of the samples; shuffled anew each epoch",
                                     {.choices = {"shuffled", "sequential"}}),
      key<&C::data, &C::Data::heldout>(
          "data.heldout", "last fraction of the tokens, never trained on", {.range = fraction()}),
      key<&C::training, &C::Training::steps>("training.steps", "optimizer steps",
                                             {.range = between(0, kMaxCount)}),
      key<&C::training, &C::Training::seq_len>("training.seq_len", "tokens in a sample",
                                               {.range = between(1, kMaxSize)}),
      key<&C::training, &C::Training::global_batch_size>(
          "training.global_batch_size", "samples a step, over all ranks",
          {.range = between(1, kMaxSize),
           .unset = "local_batch_size * ranks, or 24 rounded up to a multiple of the ranks"}),
      key<&C::training, &C::Training::local_batch_size>(
          "training.local_batch_size",
          "samples of one rank at a time; fewer than its part: gradients accumulate",
          {.range = between(1, kMaxSize), .unset = "global_batch_size / ranks"}),
      key<&C::training, &C::Training::max_norm>("training.max_norm",
                                                "gradients are scaled down to this global norm",
                                                {.range = above(0)}),
      key<&C::training, &C::Training::stop_on_nan>("training.stop_on_nan",
                                                   "end the run, with the weights before it, at a "
                                                   "step whose loss or gradient is not finite"),
      key<&C::training, &C::Training::mixed_precision_param>(
          "training.mixed_precision_param", "type of gathered parameters and activations",
          {.choices = {"float32", "bfloat16"}}),
      key<&C::training, &C::Training::mixed_precision_reduce>("training.mixed_precision_reduce",
                                                              "type in which gradients are summed",
                                                              {.choices = {"float32"}}),
      key<&C::training, &C::Training::captured_step>(
          "training.captured_step",
          "a GPU runs steps again as one CUDA graph; needs stop_on_nan=false, one rank a process"),
      key<&C::training, &C::Training::enable_cpu_offload>(
          "training.enable_cpu_offload",
          "keep shards, gradients and moments on the host, and run the optimizer there"),
      key<&C::training, &C::Training::loss>(
          "training.loss",
          "fast: head and loss in three products, whose gradients or logits are kept meanwhile; "
          "lean: in four; automatic: fast where its plan is within memory.limit",
          {.choices = {"automatic", "lean", "fast"}}),
      key<&C::memory, &C::MemorySection::limit>(
          "memory.limit", "bytes that a rank may reserve; the order of the loss is chosen to fit",
          {.range = between(1, kMaxBytes),
           .unset = "of a GPU, or a --machine, its own; else nothing is known to fit",
           .argument = "BYTES"}),
      key<&C::optimizer, &C::Optimizer::name>("optimizer.name", "which optimizer",
                                              {.choices = {"AdamW", "SGD", "Muon"}}),
      key<&C::optimizer, &C::Optimizer::lr>("optimizer.lr", "peak learning rate",
                                            {.range = at_least(0)}),
      key<&C::optimizer, &C::Optimizer::beta1>("optimizer.beta1", "decay of the first moment",
                                               {.range = fraction(), .only_if = kHasAdamw}),
      key<&C::optimizer, &C::Optimizer::beta2>("optimizer.beta2", "decay of the second moment",
                                               {.range = fraction(), .only_if = kHasAdamw}),
      key<&C::optimizer, &C::Optimizer::eps>("optimizer.eps",
                                             "added to the root of the second moment",
                                             {.range = above(0), .only_if = kHasAdamw}),
      key<&C::optimizer, &C::Optimizer::weight_decay>(
          "optimizer.weight_decay", "decay of all parameters", {.range = at_least(0)}),
      key<&C::optimizer, &C::Optimizer::no_decay>(
          "optimizer.no_decay", "parameters without decay: some of norms,biases,embeddings",
          {.argument = "KINDS"}),
      key<&C::optimizer, &C::Optimizer::momentum>(
          "optimizer.momentum", "momentum",
          {.range = fraction(), .only_if = kHasMomentum, .unset = "SGD: 0; Muon: 0.95"}),
      key<&C::optimizer, &C::Optimizer::nesterov>(
          "optimizer.nesterov", "add the gradient once more to the momentum", {.only_if = kMuon}),
      key<&C::optimizer, &C::Optimizer::ns_steps>(
          "optimizer.ns_steps", "steps of the iteration that makes a matrix orthogonal",
          {.range = between(1, 99), .only_if = kMuon}),
      key<&C::optimizer, &C::Optimizer::ns_dtype>(
          "optimizer.ns_dtype", "type in which that iteration computes",
          {.choices = {"float32", "bfloat16"}, .only_if = kMuon}),
      key<&C::optimizer, &C::Optimizer::adjust_lr_fn>(
          "optimizer.adjust_lr_fn",
          "how the shape of a matrix changes its rate; match_rms_adamw: lr and weight_decay as for "
          "AdamW",
          {.choices = {"original", "match_rms_adamw"}, .only_if = kMuon}),
      key<&C::optimizer, &C::Optimizer::adamw_lr_factor>(
          "optimizer.adamw_lr_factor",
          "this times lr is the rate of AdamW, which updates all but the matrices of the blocks",
          {.range = at_least(0), .only_if = kMuon}),
      key<&C::lr_scheduler, &C::LrScheduler::warmup_steps>(
          "lr_scheduler.warmup_steps", "steps of linear warm-up", {.range = between(0, kMaxCount)}),
      key<&C::lr_scheduler, &C::LrScheduler::decay_type>(
          "lr_scheduler.decay_type", "how the rate falls after the warm-up",
          {.choices = {"constant", "linear", "sqrt", "cosine"}}),
      key<&C::lr_scheduler, &C::LrScheduler::decay_ratio>(
          "lr_scheduler.decay_ratio", "the last fraction of the steps, in which the rate falls",
          {.range = between(0, 1), .only_if = kDecays, .unset = "all steps after the warm-up"}),
      key<&C::lr_scheduler, &C::LrScheduler::min_lr_factor>(
          "lr_scheduler.min_lr_factor", "the rate falls to this fraction of lr",
          {.range = between(0, 1), .only_if = kDecays}),
      key<&C::device, &C::DeviceSection::memory>(
          "device.memory",
          "a GPU's memory. pieces: as the driver gives it; mapped: at addresses set aside, where "
          "it grows in place",
          {.choices = {"pieces", "mapped"}, .only_if = kGpu}),
      key<&C::device, &C::DeviceSection::tf32>(
          "device.tf32", "f32 products on a GPU may round their operands to 11 significant bits",
          {.only_if = kGpu}),
      key<&C::device, &C::DeviceSection::module>(
          "device.module", "the driver module of a GPU",
          {.only_if = kGpu, .unset = "libtessera-cuda.so near this program", .argument = "FILE"}),
      key<&C::parallelism, &C::Parallelism::strategy>(
          "parallelism.strategy",
          "what is sharded, in a word. ddp: nothing; zero1: the optimizer's state; zero2: and "
          "gradients; zero3: and parameters; hybrid: zero3 within each replica; none: as the "
          "other keys say",
          {.choices = {"none", "ddp", "zero1", "zero2", "zero3", "hybrid"}}),
      key<&C::parallelism, &C::Parallelism::data_parallel_replicate_degree>(
          "parallelism.data_parallel_replicate_degree",
          "number of replicas of all parameters, each sharded over its ranks",
          {.range = between(1, 1 << 20), .argument = "N"}),
      key<&C::parallelism, &C::Parallelism::data_parallel_shard_degree>(
          "parallelism.data_parallel_shard_degree",
          "number of ranks that parameters are sharded over",
          {.range = between(1, 1 << 20), .unset = "all ranks of a replica", .argument = "N"}),
      key<&C::parallelism, &C::Parallelism::fsdp_reshard_after_forward>(
          "parallelism.fsdp_reshard_after_forward",
          "free a unit's parameters between forward and backward; default: all but the last unit; "
          "N: keep shards over N ranks",
          {.range = between(2, 1 << 20), .choices = {"default", "always", "never"}}),
      key<&C::parallelism, &C::Parallelism::fsdp_reshard_after_backward>(
          "parallelism.fsdp_reshard_after_backward",
          "free parameters between micro-batches, too; false: keep them until the update", {}),
      key<&C::parallelism, &C::Parallelism::fsdp_gradient_sync>(
          "parallelism.fsdp_gradient_sync",
          "after which micro-batches gradients are reduced; last: whole gradients stay until then, "
          "except those of tables in slices (embedding, head); all_reduce_last: over replicas "
          "after the last only",
          {.choices = {"always", "last", "all_reduce_last"}}),
      key<&C::activation_checkpoint, &C::ActivationCheckpoint::mode>(
          "activation_checkpoint.mode",
          "full: keep only a block's input and compute the rest again; selective: compute less "
          "again",
          {.choices = {"none", "selective", "full"}}),
      key<&C::activation_checkpoint, &C::ActivationCheckpoint::selective_ac_option>(
          "activation_checkpoint.selective_ac_option",
          "2: every second block, or another number; op: every block, but what attention and every "
          "second product gave is kept; every_op: attention and all products",
          {.only_if = kSelective, .argument = "N|op|every_op"}),
      key<&C::float8, &C::Float8::recipe_name>(
          "quantize.linear.float8.recipe_name",
          "multiply in 8-bit floats in linear layers, except the head; tensorwise: one scale an "
          "operand; blockwise: one for 128 elements, on a GPU of sm_90",
          {.choices = {"none", "tensorwise", "blockwise"}}),
      key<&C::float8, &C::Float8::filter_fqns>(
          "quantize.linear.float8.filter_fqns",
          "leave layers as they are whose name contains one of these, as q_proj,down_proj",
          {.only_if = kFloat8, .argument = "NAMES"}),
      key<&C::checkpoint, &C::Checkpoint::export_dtype>(
          "checkpoint.export_dtype", "type in which --save writes the weights",
          {.choices = {"float32", "bfloat16", "float16"}}),
      key<&C::checkpoint, &C::Checkpoint::enable>(
          "checkpoint.enable",
          "save the whole run now and then, and go on from the newest such step, on any --ranks"),
      key<&C::checkpoint, &C::Checkpoint::folder>("checkpoint.folder",
                                                  "folder of the checkpoints, which are step-N",
                                                  {.only_if = kSaves, .argument = "FOLDER"}),
      key<&C::checkpoint, &C::Checkpoint::interval>(
          "checkpoint.interval", "save every so many steps, and at the end",
          {.range = between(1, kMaxCount), .only_if = kSaves}),
      key<&C::checkpoint, &C::Checkpoint::keep_latest_k>(
          "checkpoint.keep_latest_k",
          "how many stay when another is saved, beside the one that was loaded; 0: all",
          {.range = between(0, kMaxCount), .only_if = kSaves}),
      key<&C::checkpoint, &C::Checkpoint::async_mode>(
          "checkpoint.async_mode",
          "async: the next steps go on while a save is written, from a copy in the host's memory",
          {.choices = {"disabled", "async"}, .only_if = kSaves}),
      key<&C::checkpoint, &C::Checkpoint::load_step>(
          "checkpoint.load_step", "go on from this step; -1: from the newest",
          {.range = between(-1, kMaxCount), .only_if = kSaves}),
      key<&C::checkpoint, &C::Checkpoint::initial_load_path>(
          "checkpoint.initial_load_path",
          "where checkpoint.folder has no checkpoint yet, go on from this one, or from the newest "
          "in this folder",
          {.only_if = kSaves, .argument = "FOLDER"}),
      key<&C::checkpoint, &C::Checkpoint::exclude_from_loading>(
          "checkpoint.exclude_from_loading",
          "what begins anew behind initial_load_path: optimizer, dataloader, or both with a comma",
          {.only_if = kSaves, .argument = "NAMES"}),
      key<&C::checkpoint, &C::Checkpoint::enable_first_step_checkpoint>(
          "checkpoint.enable_first_step_checkpoint", "save after the first step, too",
          {.only_if = kSaves}),
      key<&C::checkpoint, &C::Checkpoint::load_only>("checkpoint.load_only", "save no checkpoint",
                                                     {.only_if = kSaves}),
      key<&C::debug, &C::Debug::seed>("debug.seed",
                                      "seed of initial weights, shuffling, dropout and sampling",
                                      {.range = between(0, kMaxSeed)}),
      key<&C::debug, &C::Debug::executor>("debug.executor", "what runs the streams",
                                          {.choices = {"threaded", "inline"}}),
      key<&C::debug, &C::Debug::delay_seed>(
          "debug.delay_seed", "start a GPU's operations late, at random by this seed; 0: none",
          {.range = between(0, kMaxCount), .only_if = kGpu}),
      key<&C::debug, &C::Debug::deterministic>(
          "debug.deterministic",
          "the same bits from every run; false: attention's backward pass on a GPU may add up in "
          "any order, which is faster",
          {.only_if = kGpu}),
      key<&C::metrics, &C::Metrics::log_freq>("metrics.log_freq", "print every so many steps",
                                              {.range = between(1, kMaxCount)}),
      key<&C::metrics, &C::Metrics::jsonl>(
          "metrics.jsonl", "write one JSON object a step to this file", {.argument = "FILE"}),
      key<&C::metrics, &C::Metrics::peak_tflops>("metrics.peak_tflops",
                                                 "peak of one rank, which mfu needs",
                                                 {.range = above(0), .unset = "no mfu"}),
      key<&C::metrics, &C::Metrics::nvtx>(
          "metrics.nvtx", "show a GPU's operations as ranges in Nsight Systems", {.only_if = kGpu}),
      key<&C::validation, &C::Validation::freq>(
          "validation.freq", "held-out loss every so many steps; 0: at the end only",
          {.range = between(0, kMaxCount)}),
      key<&C::comm, &C::Comm::train_timeout_seconds>("comm.train_timeout_seconds",
                                                     "a collective that takes longer is an error",
                                                     {.range = between(1, 1 << 20)}),
      key<&C::comm, &C::Comm::heartbeat_timeout_seconds>(
          "comm.heartbeat_timeout_seconds",
          "end the job where a process of this host shows no life for so long; 0: never, for "
          "debuggers",
          {.range = between(0, 1 << 20)}),
      key<&C::comm, &C::Comm::init_timeout_seconds>("comm.init_timeout_seconds",
                                                    "processes that do not find each other for so "
                                                    "long end, and list who never came; MPI waits "
                                                    "by its own rules",
                                                    {.range = between(1, 1 << 20)}),
      key<&C::comm, &C::Comm::ordered_sums>(
          "comm.ordered_sums",
          "processes on GPUs add gradients in rank order, to the bits of threads; false: NCCL adds "
          "those of f32",
          {.only_if = kGpu}),
      key<&C::comm, &C::Comm::windows>("comm.windows",
                                       "NCCL allocates what processes on GPUs exchange, and moves "
                                       "it without a copy; but a call "
                                       "never ends once a peer has died",
                                       {.only_if = kGpu}),
      key<&C::comm, &C::Comm::gather_policy>(
          "comm.gather_policy",
          "how NCCL gathers; zero: by copy engines, without multiprocessors, where it can (NCCL "
          "2.28, one node)",
          {.choices = {"default", "zero"}, .only_if = "comm.windows=true"}),
      key<&C::comm, &C::Comm::reduce_max_ctas>(
          "comm.reduce_max_ctas",
          "NCCL reduces with at most so many blocks of threads, and leaves the others to compute; "
          "0: as it wants",
          {.range = between(0, 64), .only_if = kGpu}),
      key<&C::comm, &C::Comm::flight_record>(
          "comm.flight_record",
          "write the last collectives here where one fails, and on SIGUSR2; one file a rank, with "
          "its number before the dot",
          {.argument = "FILE"}),
  };
  return rows;
}

}  // namespace tessera::train
