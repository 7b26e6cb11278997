// What the command line alone says.
#include "tools/train/key_of.hpp"

namespace tessera::train {
namespace {

constexpr std::string_view kPlanned = "dry-run=true", kPriced = "machine!=none";

}  // namespace

// The choices of an enumeration stand in the order of its values.
std::vector<Key> flag_keys() {
  using C = Config;
  return {
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
  };
}

}  // namespace tessera::train
