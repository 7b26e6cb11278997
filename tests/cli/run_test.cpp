// Whole runs of the binary on a tiny model: what it writes, how it stops, and what it hands on.
#include <sys/types.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// Where a safetensors file of f32 has its numbers.
std::size_t first_number(const std::string& file) {
  std::uint64_t header = 0;
  REQUIRE(file.size() >= sizeof header);
  std::memcpy(&header, file.data(), sizeof header);
  REQUIRE(header < file.size() - sizeof header);
  return sizeof header + header;
}

std::int64_t numbers_that_are_nan(const std::string& file) {
  std::int64_t count = 0;
  for (std::size_t at = first_number(file); at < file.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, file.data() + at, sizeof value);
    count += std::isnan(value);
  }
  return count;
}

// 0xff.. is a NaN of every format.
std::string all_nan(std::string file) {
  std::fill(file.begin() + static_cast<std::ptrdiff_t>(first_number(file)), file.end(), '\xff');
  return file;
}

}  // namespace

TEST_CASE("a run prints and writes one line a step, and its weights go on where it ended") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const Outcome run = run_command(
      kTiny + "--ranks 2 --training.steps=3 --data.heldout=0.2 --save=a.safetensors", where);
  INFO(run.err);
  REQUIRE(run.exit_code == 0);
  CHECK(run.err.empty());
  for (const char* part :
       {"step:  1  loss: ", "step:  3  loss: ", "validate step:  3  loss: ", "planned"}) {
    CHECK(has(run.out, part));
  }
  CHECK(whole_lines(folder) == 3);

  const Outcome again = run_command(
      kTiny +
          "--ranks 2 --training.steps=0 --data.heldout=0.2 --load=a.safetensors "
          "--save=b.safetensors --sample 'and there' --sample-tokens 50 && cmp a.safetensors "
          "b.safetensors",
      where);
  INFO(again.err);
  CHECK(again.exit_code == 0);
  CHECK(has(again.out, "and there"));
  CHECK(tessera::is_utf8(again.out));  // whatever bytes a model of bytes says
  const std::string validated =
      run.out.substr(run.out.find("validate step:  3") + 17, 17);  // "  loss:  5.12345"
  CHECK(has(again.out, "validate step:  0" + validated));
  CHECK(folder.entries() == 4);
}

// The table of 1,000 rows is the largest of the model, and so lies in slices on two ranks.
TEST_CASE("two ranks sample and save a table in slices as one rank does the whole of it") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const std::string model =
      "tessera-train --model.dim=16 --model.n_layers=1 --model.n_heads=2 --model.vocab_size=1000 ";
  const Outcome plan = run_command(model + "--dry-run --ranks 2", where);
  INFO(plan.err);
  CHECK(has(plan.out, "model.embed_tokens.weight[2]"));
  CHECK(has(plan.out, "lm_head.weight[2]"));
  REQUIRE(run_command(model + "--data.path=book.txt --training.steps=2 --save=a.safetensors", where)
              .exit_code == 0);
  const auto said = [&](const std::string& ranks) {
    const Outcome run = run_command(model + "--training.steps=0 --load=a.safetensors --ranks " +
                                        ranks + " --save=b.safetensors --sample 'and there' && " +
                                        "cmp a.safetensors b.safetensors",
                                    where);
    INFO(run.err);
    CHECK(run.exit_code == 0);
    const std::size_t at = run.out.find("and there");
    REQUIRE(at != std::string::npos);
    return run.out.substr(at, run.out.rfind("race checker") - at);  // which counts the ranks' work
  };
  CHECK(said("2") == said("1"));
}

TEST_CASE("one rank of a world without peers trains as planned, and shows no loss") {
  const BookFolder folder;
  const Outcome run = run_command(kTiny + "--emulate 4 --training.steps=3", folder.path().string());
  INFO(run.err);
  REQUIRE(run.exit_code == 0);
  CHECK(has(run.out, "emulated: the first of 4 ranks runs without its peers"));
  CHECK(has(run.out, "as planned"));
  CHECK(has(run.out, "loss:      nan"));
  CHECK(whole_lines(folder) == 3);
  CHECK(has(folder.read("out.jsonl"), "\"loss\": null, \"grad_norm\": null"));
}

TEST_CASE("weights of another model are bad input") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const std::string model =
      "tessera-train --training.steps=0 --model.dim=16 --model.n_layers=1 --model.n_heads=2 ";
  REQUIRE(run_command(model + "--save=a.safetensors", where).exit_code == 0);
  for (const char* other : {"--model.n_layers=2", "--model.dim=32", "--model.ffn_dim=96",
                            "--model.tie_embeddings=true"}) {
    const Outcome outcome = run_command(model + "--load=a.safetensors " + other, where);
    INFO(other << ": " << outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(has(outcome.err, "a.safetensors"));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  }
}

TEST_CASE(
    "the first signal stops a run after a whole step, with whole files and 128 + its number") {
  for (const int signal : {SIGINT, SIGTERM}) {
    const BookFolder folder;
    // The shell waits for the first metrics line, so that the signal meets a run in its steps.
    const Outcome outcome =
        run_command(kTiny +
                        "--ranks 2 --training.steps=1000000 --save=a.safetensors > log & run=$!; "
                        "until [ -s out.jsonl ]; do sleep 0.05; done; kill -" +
                        std::to_string(signal) + " $run; wait $run",
                    folder.path().string());
    INFO(outcome.err);
    CHECK(outcome.exit_code == 128 + signal);
    CHECK(outcome.err.empty());
    CHECK(whole_lines(folder) >= 1);
    CHECK(has(folder.read("log"), std::string("stopped by ") +
                                      (signal == SIGINT ? "SIGINT" : "SIGTERM") + " after step "));
    CHECK(folder.entries() == 4);  // book, log, metrics, weights: nothing temporary is left
  }
}

TEST_CASE("SIGUSR2 writes the flight record of each rank, and the run goes on") {
  const BookFolder folder;
  const Outcome outcome = run_command(
      kTiny +
          "--ranks 2 --training.steps=1000000 --comm.flight_record=record.json > log & run=$!; "
          "until [ -s out.jsonl ]; do sleep 0.05; done; ls > before; kill -USR2 $run; "
          "until [ -s record.0.json ] && [ -s record.1.json ]; do sleep 0.05; done; "
          "kill -INT $run; wait $run",
      folder.path().string());
  INFO(outcome.err);
  CHECK(outcome.exit_code == 128 + SIGINT);
  CHECK(outcome.err.empty());
  CHECK_FALSE(has(folder.read("before"), "record"));
  for (const std::string rank : {"0", "1"}) {
    const std::string record = folder.read("record." + rank + ".json");
    CHECK(record.starts_with("{\"rank\": " + rank + ", \"size\": 2, \"failure\": \"\", "));
    CHECK(has(record, "\"operation\": \"reduce_scatter\""));
    CHECK(has(record, "\"state\": \"done\""));
    CHECK(record.ends_with("}\n]}\n"));
  }
}

TEST_CASE("launched processes print once and write once") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const Outcome outcome =
      run_command("mpirun -n 2 " + kTiny + "--training.steps=2 --save=a.safetensors",
                  folder.path().string(), kMpirun);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(whole_lines(folder) == 2);
  const std::size_t first = outcome.out.find("step:  2  ");
  REQUIRE(first != std::string::npos);
  CHECK(outcome.out.find("step:  2  ", first + 1) == std::string::npos);
}

TEST_CASE("processes and threads have the same losses, whichever micro-batches are reduced") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const auto losses = [&](const std::string& how, const std::string& options) {
    const Outcome outcome = run_command(how + kTiny +
                                            "--training.global_batch_size=12 "
                                            "--training.local_batch_size=1 --training.steps=3 " +
                                            options,
                                        folder.path().string(), kMpirun);
    INFO(how << options << outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.out.find("; 4 of 4 ranks as in their plans") != std::string::npos);
    std::vector<std::string> found;
    std::istringstream lines(folder.read("out.jsonl"));
    for (std::string line; std::getline(lines, line);)
      found.push_back(line.substr(0, line.find(", \"lr\"")));
    return found;
  };
  for (const std::string sync : {"last", "all_reduce_last", "last --optimizer.name=Muon"}) {
    const std::string option =
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.fsdp_gradient_sync=" + sync;
    const auto threads = losses("", option + " --ranks=4");
    CHECK(threads.size() == 3);
    CHECK(threads == losses("mpirun -n 4 ", option));
    if (sync.find("Muon") == std::string::npos)
      CHECK(threads == losses("mpirun -n 4 ", option + " --training.enable_cpu_offload=true"));
  }
  for (const std::string option :
       {"--parallelism.fsdp_reshard_after_forward=2 --activation_checkpoint.mode=selective "
        "--activation_checkpoint.selective_ac_option=1",
        "--parallelism.strategy=zero1 --activation_checkpoint.mode=selective "
        "--activation_checkpoint.selective_ac_option=op",
        "--parallelism.strategy=hybrid --parallelism.data_parallel_replicate_degree=2"})
    CHECK(losses("", option + " --ranks=4") == losses("mpirun -n 4 ", option));
}

// Sums are taken in rank order, and no gradient is clipped, so that what is sharded changes no bit.
TEST_CASE("strategies have the same losses, and say what they stand for") {
  const BookFolder folder;
  const auto losses = [&](const std::string& strategy) {
    const Outcome outcome =
        run_command(kTiny +
                        "--training.global_batch_size=8 --training.steps=3 --training.max_norm=1e9 "
                        "--ranks=4 --parallelism.strategy=" +
                        strategy,
                    folder.path().string());
    INFO(outcome.err);
    CHECK(outcome.exit_code == 0);
    const bool is_none = strategy.starts_with("none");
    CHECK((outcome.out.find("strategy " + strategy.substr(0, strategy.find(' ')) +
                            ": data_parallel_replicate_degree=") != std::string::npos) != is_none);
    std::vector<std::string> found;
    std::istringstream lines(folder.read("out.jsonl"));
    for (std::string line; std::getline(lines, line);)
      if (const std::size_t at = line.find("\"loss\""); at != std::string::npos)
        found.push_back(line.substr(at, line.find(',', at) - at));
    return found;
  };
  const std::string muon = " --optimizer.name=Muon --optimizer.lr=0.02";  // each rank owns some
  for (const std::string& optimizer : {std::string(), muon}) {
    const auto plain = losses("none" + optimizer);
    CHECK(plain.size() == 3);
    for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3"}) {
      INFO(strategy << optimizer);
      CHECK(losses(strategy + optimizer) == plain);
    }
  }
  CHECK(losses("none" + muon) != losses("none"));
  CHECK(losses("none --training.enable_cpu_offload=true") == losses("none"));
  const std::string replicas = " --parallelism.data_parallel_replicate_degree=2";
  CHECK(losses("hybrid" + replicas) ==
        losses("none --parallelism.data_parallel_shard_degree=2" + replicas));
  const std::string twice = " --training.local_batch_size=1";
  CHECK(losses("zero1" + twice) == losses("none --parallelism.fsdp_gradient_sync=last" + twice));
}

TEST_CASE("a dry run says what a strategy stands for") {
  const BookFolder folder;
  const auto stands_for = [&](const std::string& strategy) {
    const Outcome plan = run_command(
        "tessera-train --model.dim=16 --model.n_layers=1 --model.n_heads=2 --training.seq_len=16 "
        "--training.global_batch_size=8 --data.path=book.txt --dry-run --ranks=4 "
        "--parallelism.strategy=" +
            strategy,
        folder.path().string());
    const std::size_t at = plan.out.find("strategy ");
    return at == std::string::npos ? plan.err : plan.out.substr(at, plan.out.find('\n', at) - at);
  };
  CHECK(stands_for("ddp") ==
        "strategy ddp: data_parallel_replicate_degree=4, data_parallel_shard_degree=1, "
        "fsdp_reshard_after_forward=default, fsdp_reshard_after_backward=true, "
        "fsdp_gradient_sync=always");
  CHECK(stands_for("zero1 --training.local_batch_size=1") ==
        "strategy zero1: data_parallel_replicate_degree=1, data_parallel_shard_degree=4, "
        "fsdp_reshard_after_forward=never, fsdp_reshard_after_backward=false, "
        "fsdp_gradient_sync=last");
  CHECK(stands_for("hybrid --parallelism.data_parallel_replicate_degree=2") ==
        "strategy hybrid: data_parallel_replicate_degree=2, data_parallel_shard_degree=2, "
        "fsdp_reshard_after_forward=default, fsdp_reshard_after_backward=true, "
        "fsdp_gradient_sync=always");
}

TEST_CASE("under TESSERA_CHECK=1 a run closes with what the race checker saw") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const Outcome run =
      run_command(kTiny + "--ranks 2 --training.steps=2", where, {{"TESSERA_CHECK", "1"}});
  INFO(run.out << run.err);
  CHECK(run.exit_code == 0);
  const std::size_t line = run.out.rfind("\nrace checker: ");
  REQUIRE(line != std::string::npos);
  CHECK(run.out.ends_with(" operations, 0 races\n"));
  CHECK(std::stoi(run.out.substr(line + 15)) > 100);
  const Outcome wrong = run_command(kTiny + "--training.steps=1", where, {{"TESSERA_CHECK", "on"}});
  CHECK(wrong.exit_code == 2);
  CHECK(has(wrong.err, "TESSERA_CHECK='on' is neither 0 nor 1"));
}

TEST_CASE("data that changes while it is trained on ends the run with one line that names it") {
  struct {
    const char *change, *says;
    int exit_code;
  } const changes[] = {
      {"truncate -s 0 book.txt", "token file 'book.txt' shrank while it was read", 1},
      {"head -c 6000 /dev/zero | tr '\\0' '~' | dd of=book.txt conv=notrunc status=none",
       "has id 126 at position ", 2}};
  for (const auto& [change, says, exit_code] : changes) {
    const BookFolder folder;
    const Outcome outcome =
        run_command(kTiny +
                        "--model.vocab_size=126 --training.steps=1000000 > log & run=$!; "
                        "until [ -s out.jsonl ]; do sleep 0.05; done; " +
                        change + "; wait $run",
                    folder.path().string());
    INFO(outcome.err);
    CHECK(outcome.exit_code == exit_code);
    CHECK(has(outcome.err, says));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK_FALSE(has(folder.read("log"), "nan"));
  }
}

TEST_CASE("a run that diverges ends with the weights before it, and none of them is NaN") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const std::string diverges = kTiny + "--ranks 2 --training.steps=9 --optimizer.lr=1e30 ";
  const Outcome run = run_command(diverges + "--save=a.safetensors", where);
  INFO(run.out << run.err);
  CHECK(run.exit_code == 1);
  CHECK(
      run.err ==
      "tessera-train: training.stop_on_nan: the gradient of 'model.embed_tokens.weight' of step " +
          std::to_string(whole_lines(folder)) +
          " is not finite; the weights before it are saved; lower optimizer.lr or look at the "
          "data\n");
  CHECK(whole_lines(folder) < 9);
  const std::string saved = folder.read("a.safetensors");
  CHECK(numbers_that_are_nan(saved) == 0);

  // A run that starts from NaN has learnt nothing to write over a file.
  folder.write("nan.safetensors", all_nan(saved));
  const Outcome useless = run_command(
      kTiny + "--ranks 2 --training.steps=9 --load=nan.safetensors --save=a.safetensors", where);
  CHECK(useless.exit_code == 1);
  CHECK(has(useless.err, "step 1 is not finite; there was no step before it to save"));
  CHECK(folder.read("a.safetensors") == saved);

  // An update that overflows by itself is none to save, as the first or after others.
  for (const char* const options : {"--training.steps=1", "--training.steps=3",
                                    "--training.steps=3 --checkpoint.export_dtype=bfloat16"}) {
    const Outcome overflown = run_command(kTiny +
                                              "--ranks 2 --save=a.safetensors --optimizer.lr=3e38 "
                                              "--optimizer.weight_decay=50 " +
                                              options,
                                          where);
    INFO(options << ": " << overflown.err);
    CHECK(overflown.exit_code == 1);
    CHECK(has(overflown.err, "tessera-train: training.stop_on_nan: "));
    CHECK(has(overflown.err, "'model.embed_tokens.weight'"));
    CHECK_FALSE(has(overflown.err, "rank 1"));
    CHECK(has(overflown.err, "nothing is written; lower optimizer.lr or look at the data\n"));
    CHECK(folder.read("a.safetensors") == saved);
  }

  const Outcome allowed =
      run_command(diverges + "--training.stop_on_nan=false --save=b.safetensors", where);
  CHECK(allowed.exit_code == 0);
  CHECK(whole_lines(folder) == 9);
  CHECK(numbers_that_are_nan(folder.read("b.safetensors")) > 0);
}

TEST_CASE("an installed program finds a GPU's module where Debian installs libraries") {
  const BookFolder folder;
  const Outcome outcome = run_command(
      "mkdir -p prefix/bin prefix/lib/riscv64-linux-gnu && "
      "echo no module > prefix/lib/riscv64-linux-gnu/libtessera-cuda.so && cp $(command -v "
      "tessera-train) prefix/bin/ && prefix/bin/" +
          kTiny + "--device=cuda --training.steps=1",
      folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.err, "prefix/lib/riscv64-linux-gnu/libtessera-cuda.so' cannot be loaded: "));
}

TEST_CASE("a model that this machine cannot hold is refused before it takes any memory") {
  const BookFolder folder;
  for (const char* steps : {"0", "1"}) {
    const Outcome outcome =
        run_command(kTiny +
                        "--model.dim=65536 --model.n_heads=512 --model.n_layers=64 "
                        "--training.steps=" +
                        steps,
                    folder.path().string());
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, "and this machine has "));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(outcome.computed_seconds <= 1);
  }
}

// The rate times the decay is 1: what decays is all but 0 after a step.
TEST_CASE("norms, biases and embeddings are left without decay where one says so") {
  const auto largest = [](const TemporaryFolder& folder, const std::string& name) {
    const tessera::checkpoint::SafetensorsReader file(folder / "a.safetensors");
    const auto bytes = file.bytes(*file.find(name));
    float most = 0;
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      float value;
      std::memcpy(&value, bytes.data() + i, sizeof value);
      most = std::max(most, std::abs(value));
    }
    return most;
  };
  const std::string llama = "", gpt2 = "--model.name=gpt2 ";
  const struct {
    std::string options, name;
    bool decays;
  } cases[] = {
      {llama, "model.norm.weight", true},
      {llama + "--optimizer.no_decay=norms", "model.norm.weight", false},
      {llama + "--optimizer.no_decay=norms", "lm_head.weight", true},
      {llama + "--optimizer.no_decay=norms,embeddings", "model.embed_tokens.weight", false},
      {llama + "--optimizer.no_decay=biases", "model.embed_tokens.weight", true},
      {gpt2 + "--optimizer.no_decay=norms", "transformer.ln_f.weight", false},
      {gpt2 + "--optimizer.no_decay=biases,embeddings", "transformer.wte.weight", false},
      {gpt2 + "--optimizer.no_decay=biases,embeddings", "transformer.ln_f.weight", true},
  };
  for (const auto& c : cases) {
    const BookFolder folder;
    const Outcome outcome = run_command(kTiny + c.options +
                                            " --optimizer.name=SGD --optimizer.lr=1e-6 "
                                            "--optimizer.weight_decay=1e6 --training.steps=1 "
                                            "--save=a.safetensors --ranks 2",
                                        folder.path().string());
    INFO(c.options << ' ' << c.name << ' ' << outcome.err);
    REQUIRE(outcome.exit_code == 0);
    CHECK((largest(folder, c.name) < 1e-4f) == c.decays);
  }
}
