// How a run runs: devices, shards, recomputation, checkpoints, and what it reports.
#include "tools/train/key_of.hpp"

namespace tessera::train {
namespace {

constexpr std::string_view kSaves = "checkpoint.enable=true",
                           kSelective = "activation_checkpoint.mode=selective",
                           kFloat8 = "quantize.linear.float8.recipe_name!=none",
                           kGpu = "device!=cpu";

}  // namespace

// The choices of an enumeration stand in the order of its values.
std::vector<Key> running_keys() {
  using C = Config;
  return {
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
                                                    "long end, and list who never came; under MPI "
                                                    "they end without a list",
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
          "2.28, a driver of CUDA 12.5, one node); measured: by what is faster beside compute on "
          "rank 0, in a moment before the first step",
          {.choices = {"default", "zero", "measured"}, .only_if = "comm.windows=true"}),
      key<&C::comm, &C::Comm::reduce_max_ctas>(
          "comm.reduce_max_ctas",
          "NCCL reduces with at most so many blocks of threads, and leaves the others to compute; "
          "0: as it wants; -1: that or 8, by what is faster beside compute on rank 0",
          {.range = between(NcclOptions::kMeasuredCtas, 64), .only_if = kGpu}),
      key<&C::comm, &C::Comm::flight_record>(
          "comm.flight_record",
          "write the last collectives here where one fails, and on SIGUSR2; one file a rank, with "
          "its number before the dot",
          {.argument = "FILE"}),
  };
}

}  // namespace tessera::train
