// The plan that one process prints is what another one uses, to the byte: in the first step, in
// every later one, in evaluation and in a save, for every option that tessera-train has.
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <regex>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// The largest rank's bytes: first step, later ones, evaluation, save.
struct Phases {
  std::array<std::int64_t, 4> peaks{}, reserved{};
  bool operator==(const Phases&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Phases& m) {
  for (std::size_t i = 0; i < m.peaks.size(); ++i)
    out << "peak " << m.peaks[i] << ", reserved " << m.reserved[i] << "; ";
  return out;
}

// The numbers that `pattern` captures, of each match in turn.
std::vector<std::vector<std::int64_t>> numbers(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<std::vector<std::int64_t>> out;
  for (std::sregex_iterator i(text.begin(), text.end(), regex), end; i != end; ++i) {
    std::vector<std::int64_t>& row = out.emplace_back();
    for (std::size_t k = 1; k < i->size(); ++k) row.push_back(std::stoll((*i)[k]));
  }
  return out;
}

Phases planned(const std::string& out) {
  Phases m;
  const auto steps = numbers(
      out,
      R"(like it: planned peak (\d+) bytes .* in step 1, (\d+) bytes .*, reserved (\d+) bytes)");
  const auto phases =
      numbers(out, R"(in evaluation: (\d+) .*; in a save: (\d+) bytes; reserved after step 1: )"
                   R"((\d+) bytes, evaluation: (\d+) bytes, a save: (\d+) )");
  REQUIRE(!steps.empty());
  REQUIRE(steps.size() == phases.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto &s = steps[i], &p = phases[i];
    const Phases kind{{s[0], s[1], p[0], p[1]}, {p[2], s[2], p[3], p[4]}};
    for (std::size_t k = 0; k < m.peaks.size(); ++k) {
      m.peaks[k] = std::max(m.peaks[k], kind.peaks[k]);
      m.reserved[k] = std::max(m.reserved[k], kind.reserved[k]);
    }
  }
  return m;
}

Phases used(const std::string& jsonl, const std::string& out, int ranks) {
  const auto steps =
      numbers(jsonl, R"("memory_peak_bytes": (\d+).*"memory_reserved_bytes": (\d+))");
  const auto phases = numbers(
      out, R"(: planned peak \d+ bytes, used (\d+) .*; planned reserve \d+ bytes, used (\d+) )");
  const auto alike = numbers(out, R"(; (\d+) of (\d+) ranks as in their plans)");
  REQUIRE(steps.size() == 5);
  REQUIRE(phases.size() == 2);  // evaluation and save
  // The steps, the evaluation, the save: each rank by its own plan.
  CHECK(alike == std::vector<std::vector<std::int64_t>>(3, {ranks, ranks}));
  std::int64_t later_peak = 0, later_reserved = 0;
  for (std::size_t k = 1; k < steps.size(); ++k) {
    later_peak = std::max(later_peak, steps[k][0]);
    later_reserved = std::max(later_reserved, steps[k][1]);
  }
  return {{steps[0][0], later_peak, phases[0][0], phases[1][0]},
          {steps[0][1], later_reserved, phases[0][1], phases[1][1]}};
}

void write_book(TemporaryFolder& folder) {
  std::string text;
  while (text.size() < 6000) text += "and there was light. ";
  folder.write("book.txt", text);
}

// What a run of 5 steps with evaluations between them uses, and what the plan says of it, in every
// phase.
void check_run(const std::string& options, int ranks, int replicas) {
  TemporaryFolder folder;
  write_book(folder);
  const std::string command =
      "tessera-train --model.dim=16 --model.n_layers=3 --model.n_heads=2 --training.seq_len=16 "
      "--training.global_batch_size=12 --training.steps=5 --validation.freq=2 --data.path=book.txt "
      "--data.heldout=0.2 --ranks " +
      std::to_string(ranks) +
      " --parallelism.data_parallel_replicate_degree=" + std::to_string(replicas) + " " + options +
      (options.ends_with("_sync=")      ? replicas > 1 ? "all_reduce_last" : "last"
       : options.ends_with("_forward=") ? ranks == 4 && replicas == 1 ? "2" : "always"
                                        : "");
  INFO(command);
  const Outcome plan = run_command(command + " --dry-run", folder.path().string());
  const Outcome run = run_command(command + " --metrics.jsonl=out.jsonl --save=a.safetensors",
                                  folder.path().string());
  INFO(plan.err << run.err);
  REQUIRE(plan.exit_code == 0);
  CHECK(plan.out.ends_with(": 2.00 MiB of scratch for each thread that runs kernels\n"));
  REQUIRE(run.exit_code == 0);
  const Phases expected = planned(plan.out), found = used(folder.read("out.jsonl"), run.out, ranks);
  CHECK(found == expected);
  CHECK(expected.peaks[3] > 0);
  std::int64_t on_host = 0;  // of the largest rank
  for (const auto& peaks :
       numbers(plan.out, R"(on the host: planned peak (\d+) bytes .* in step 1, (\d+) bytes)"))
    on_host = std::max({on_host, peaks[0], peaks[1]});
  const auto of_run = numbers(run.out, R"(on the host: planned peak (\d+) bytes, used (\d+) )");
  const bool is_offloaded = options.find("offload") != std::string::npos;
  CHECK((on_host > 0) == is_offloaded);
  CHECK(of_run == (is_offloaded ? std::vector<std::vector<std::int64_t>>{{on_host, on_host}}
                                : std::vector<std::vector<std::int64_t>>{}));
}

}  // namespace

TEST_CASE("a run uses what --dry-run said in a process of its own, in every phase") {
  GridShare share;
  for (const std::string options :
       {"",
        "--parallelism.fsdp_reshard_after_forward=always",
        "--parallelism.fsdp_reshard_after_forward=never",
        "--parallelism.fsdp_reshard_after_forward=",
        "--activation_checkpoint.mode=full",
        "--training.local_batch_size=1",
        "--training.mixed_precision_param=bfloat16",
        "--model.tie_embeddings=true",
        "--optimizer.name=SGD --optimizer.momentum=0.9 --optimizer.nesterov=true",
        "--optimizer.name=Muon",
        "--optimizer.name=Muon --model.projections=fused",
        ("--model.projections=fused --training.mixed_precision_param=bfloat16 "
         "--training.local_batch_size=1 --activation_checkpoint.mode=selective"),
        "--optimizer.name=Muon --optimizer.ns_dtype=bfloat16 --model.tie_embeddings=true",
        "--model.name=gpt2 --model.dropout=0.1",
        ("--model.name=gpt2 --activation_checkpoint.mode=full --training.local_batch_size=1 "
         "--training.mixed_precision_param=bfloat16 "
         "--parallelism.fsdp_reshard_after_forward=never"),
        "--training.local_batch_size=1 --parallelism.fsdp_reshard_after_backward=false",
        ("--model.name=gpt2 --training.local_batch_size=1 "
         "--parallelism.fsdp_reshard_after_backward=false "
         "--parallelism.fsdp_reshard_after_forward=never"),
        "--training.local_batch_size=1 --parallelism.fsdp_gradient_sync=",
        "--training.enable_cpu_offload=true --training.mixed_precision_param=bfloat16",
        "--activation_checkpoint.mode=selective",
        ("--model.name=gpt2 --model.dropout=0.1 --activation_checkpoint.mode=selective "
         "--activation_checkpoint.selective_ac_option=op --training.local_batch_size=1")})
    for (const int ranks : {1, 2, 3, 4})  // 3 divides neither the vocabulary nor the widths
      for (const int replicas : {1, 2})
        if (ranks % replicas == 0 && share.takes()) check_run(options, ranks, replicas);
}

// Slots learn which pass comes after which, so what a step reserves can change until it has come
// again. A run says itself whether any was not as planned.
TEST_CASE("every step of a run of random options uses what was planned") {
  GridShare share;
  TemporaryFolder folder;
  write_book(folder);
  for (std::uint64_t first = fresh_seed(), trial = 0; trial < 40; ++trial) {
    if (!share.takes()) continue;
    const std::uint64_t seed = first + trial;
    Dice dice(seed);
    const int ranks = dice.of({1, 2, 2, 3, 3, 4}), local = dice.of({1, 2}),
              micro_batches = dice.of({1, 2, 3, 4}), heads = dice.of({1, 2});
    std::string options = "--training.steps=10";
    const auto add = [&](const std::string& option, const auto& value) {
      options += tessera::concat(" --", option, "=", value);
    };
    const auto some = [&](const char* option, std::initializer_list<const char*> values) {
      if (dice.once_in(2)) add(option, dice.of(values));
    };
    add("model.n_heads", heads);
    add("model.dim", heads * dice.of({8, 8, 32}));
    add("model.n_layers", dice.of({1, 2, 3}));
    add("training.seq_len", dice.of({8, 16, 20}));
    add("training.local_batch_size", local);
    add("training.global_batch_size", ranks * local * micro_batches);
    add("validation.freq", dice.of({0, 1, 2, 3}));
    some("model.name", {"gpt2"});
    some("model.tie_embeddings", {"true", "false"});
    some("training.mixed_precision_param", {"bfloat16"});
    some("training.loss", {"lean", "fast"});
    some("activation_checkpoint.mode",
         {"full", "selective --activation_checkpoint.selective_ac_option=op"});
    some("parallelism.fsdp_reshard_after_forward", {"always", "never", "default"});
    some("parallelism.fsdp_reshard_after_backward", {"true", "false"});
    if (micro_batches > 1) some("parallelism.fsdp_gradient_sync", {"last"});
    some("optimizer.name", {"SGD", "Muon", "AdamW"});
    if (ranks % 2 == 0) some("parallelism.data_parallel_replicate_degree", {"2"});
    const std::string command = tessera::concat(
        "tessera-train --data.path=book.txt --data.heldout=0.2 --ranks ", ranks, " ", options);
    INFO("seed " << seed << ": " << command);
    const Outcome run = run_command(command, folder.path().string());
    INFO(run.out << run.err);
    CHECK(run.exit_code == 0);
    CHECK(run.out.find(" MiB), as planned; ") != std::string::npos);
    CHECK(numbers(run.out, R"(; (\d+) of (\d+) ranks as in their plans)") ==
          std::vector<std::vector<std::int64_t>>(2, {ranks, ranks}));  // the steps, the evaluation
  }
}

TEST_CASE("a save behind steps that leave units open uses what was planned") {
  TemporaryFolder folder;
  write_book(folder);
  for (const std::string strategy : {"zero1", "zero2", "ddp"}) {
    const Outcome run = run_command(
        "tessera-train --data.path=book.txt --model.dim=16 --training.seq_len=16 --ranks 2 "
        "--training.global_batch_size=4 --training.steps=4 --save=a.safetensors "
        "--parallelism.strategy=" +
            strategy,
        folder.path().string());
    INFO(strategy << ": " << run.out << run.err);
    CHECK(run.exit_code == 0);
    CHECK(numbers(run.out, R"(; (\d+) of (\d+) ranks as in their plans)") ==
          std::vector<std::vector<std::int64_t>>(2, {2, 2}));  // the steps, the save
  }
}

// Of 3 ranks the middle one has rows of two of the matrices that a projection stacks.
TEST_CASE("a dry run plans ranks apart whose rows are of other matrices") {
  TemporaryFolder folder;
  write_book(folder);
  const std::string command =
      "tessera-train --data.path=book.txt --model.dim=60 --model.n_heads=6 "
      "--model.projections=fused --optimizer.name=Muon --training.seq_len=16 --ranks 3 "
      "--training.global_batch_size=9 --training.local_batch_size=1 --training.steps=1";
  const Outcome plan = run_command(command + " --dry-run", folder.path().string());
  const Outcome run = run_command(command, folder.path().string());
  INFO(plan.out << plan.err << run.out << run.err);
  REQUIRE((plan.exit_code == 0 && run.exit_code == 0));
  std::int64_t most = 0;
  for (const auto& peak : numbers(plan.out, R"(like it: planned peak (\d+) bytes)"))
    most = std::max(most, peak[0]);
  CHECK(numbers(run.out, R"(memory a rank: planned peak (\d+) bytes, used (\d+) )") ==
        std::vector<std::vector<std::int64_t>>{{most, most}});
}

TEST_CASE("strategies differ in who shards, in what is gathered again, and in what stays open") {
  TemporaryFolder folder;
  write_book(folder);
  struct Row {
    std::string strategy, sharded;
    std::int64_t gathers, all_reduces;  // of one block, root, table and head; 0: no such line
    bool stays_open;
  };
  const std::vector<Row> rows = {{"ddp", "plan for 1 rank, in 4 replicas\n", 0, 4, false},
                                 {"zero1", "plan for 4 ranks\n", 4, 0, true},
                                 {"zero2", "plan for 4 ranks\n", 4, 0, false},
                                 {"zero3", "plan for 4 ranks\n", 5, 0, false},
                                 {"hybrid --parallelism.data_parallel_replicate_degree=2",
                                  "plan for 2 ranks, in 2 replicas\n", 5, 4, false}};
  for (const Row& row : rows) {
    const Outcome plan = run_command(
        "tessera-train --data.path=book.txt --model.dim=16 --model.n_layers=1 --model.n_heads=2 "
        "--training.seq_len=16 --training.global_batch_size=8 --dry-run --ranks=4 "
        "--parallelism.strategy=" +
            row.strategy,
        folder.path().string());
    INFO(row.strategy << ": " << plan.out << plan.err);
    CHECK(has(plan.out, row.sharded));
    const auto all_reduces = numbers(plan.out, R"(over replicas (\d+) all-reduces)");
    CHECK((all_reduces.empty() ? 0 : all_reduces[0][0]) == row.all_reduces);
    CHECK(numbers(plan.out, R"((\d+) all-gathers of)") ==
          std::vector<std::vector<std::int64_t>>{{row.gathers}});
    CHECK(has(plan.out, "all units: open after backward") == row.stays_open);
  }
}
