// What a run trains: model, data, steps, memory, optimizer and learning rate.
#include "tools/train/key_of.hpp"

namespace tessera::train {
namespace {

constexpr std::string_view kLlama = "model.name=llama", kGpt2 = "model.name=gpt2",
                           kHasAdamw = "optimizer.name!=SGD",
                           kHasMomentum = "optimizer.name!=AdamW", kSgd = "optimizer.name=SGD",
                           kMuon = "optimizer.name=Muon",
                           kDecays = "lr_scheduler.decay_type!=constant";

}  // namespace

// The choices of an enumeration stand in the order of its values.
std::vector<Key> training_keys() {
  using C = Config;
  return {
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
          "optimizer.nesterov", "add the gradient once more to the momentum",
          {.only_if = kHasMomentum, .unset = "SGD: false; Muon: true"}),
      key<&C::optimizer, &C::Optimizer::dampening>(
          "optimizer.dampening", "a gradient goes into the momentum less this part of it",
          {.range = between(0, 1), .only_if = kSgd}),
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
  };
}

}  // namespace tessera::train
