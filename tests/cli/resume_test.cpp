// Runs that go on where another was: the bits of the one that nobody interrupted, on any ranks.
#include <filesystem>
#include <string>

#include "tests/cli/resumable_run.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// Lines of metrics without what the clock says.
std::string losses(const TemporaryFolder& folder) {
  std::string text = folder.read("out.jsonl"), kept;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    kept += line.substr(0, line.find(", \"tokens_per_second\"")) + '\n';
  }
  return kept;
}

}  // namespace

TEST_CASE("a run that goes on has the bits of the one that was not interrupted") {
  bool is_async = false;
  for (const std::string& options :
       {std::string("--ranks 2 "), std::string("--ranks 2 --data.heldout=0.1 --validation.freq=3 "),
        std::string(
            "--ranks 4 --optimizer.name=Muon --parallelism.data_parallel_replicate_degree=2 "),
        std::string("--ranks 2 --optimizer.name=SGD --optimizer.momentum=0.9 "
                    "--optimizer.dampening=0.5 "
                    "--training.local_batch_size=1 --lr_scheduler.warmup_steps=5 "),
        std::string("--ranks 1 --model.name=gpt2 --model.dropout=0.2 "
                    "--training.mixed_precision_param=bfloat16 ")}) {
    const BookFolder folder;
    // 375 samples, so that 4 a step go through the end of the epoch between steps 93 and 94.
    const std::string steps = options.find("Muon") == std::string::npos ? "11" : "98",
                      cut = steps == "11" ? "6" : "92";
    INFO(options);
    run_well(kTiny + options + "--training.steps=" + steps + " --save=whole.safetensors", folder);
    const std::string whole = losses(folder);
    is_async = !is_async;  // by turns
    run_well(kResumed + options + (is_async ? kAsync : "") + "--training.steps=" + cut, folder);
    const Outcome resumed = run_well(
        kResumed + options + "--training.steps=" + steps + " --save=resumed.safetensors", folder);
    CHECK(has(resumed.out, "checkpoint: the run goes on after step " + cut +
                               " of 'checkpoint/step-" + cut + "', which "));
    CHECK(has(resumed.out, "checkpoint: changed since: training.steps " + cut + " -> " + steps));
    CHECK(losses(folder) == whole);
    CHECK(folder.read("resumed.safetensors") == folder.read("whole.safetensors"));
  }
}

TEST_CASE("a run goes on with other ranks, batches, rates and layouts") {
  const BookFolder folder;
  run_well(kResumed + "--ranks 2 --training.steps=6", folder);
  const Outcome resumed = run_well(
      kResumed +
          "--ranks 3 --training.steps=9 --training.global_batch_size=6 --optimizer.lr=1e-4 "
          "--model.projections=fused",
      folder);
  CHECK(has(resumed.out, "which 2 ranks saved\n"));
  CHECK(has(resumed.out,
            "checkpoint: changed since: model.projections separate -> fused, optimizer.lr 8e-04 -> "
            "1e-04, training.global_batch_size 4 -> 6, training.steps 6 -> 9\n"));
  CHECK(whole_lines(folder) == 9);

  // Weights alone, and nothing more to train.
  run_well(kTiny + "--ranks 1 --training.steps=2 --load=checkpoint/step-9", folder);
  run_well(kResumed + "--ranks 1 --training.steps=9", folder);
  // A whole run is forked, and leaves what it came from alone.
  const Outcome forked =
      run_well(kResumed +
                   "--ranks 2 --training.steps=10 --training.global_batch_size=6 "
                   "--checkpoint.folder=fork --checkpoint.initial_load_path=checkpoint "
                   "--checkpoint.exclude_from_loading=optimizer,dataloader",
               folder);
  CHECK(has(forked.out, "goes on after step 9 of 'checkpoint/step-9'"));
  CHECK(has(forked.out, "checkpoint: the optimizer's state begins anew\n"));
  CHECK(has(forked.out, "checkpoint: the order of samples begins anew\n"));
  CHECK(std::filesystem::exists(folder.path() / "fork/step-10/manifest.json"));
  CHECK_FALSE(std::filesystem::exists(folder.path() / "checkpoint/step-10"));
}

TEST_CASE("what a forked run leaves out begins anew once, and not when the run goes on") {
  const BookFolder folder;
  run_well(kResumed + "--training.steps=4", folder);
  const std::string fork =
      kResumed + "--checkpoint.initial_load_path=checkpoint --checkpoint.folder=";
  const std::string leaves_out = " --checkpoint.exclude_from_loading=optimizer,dataloader ";
  run_well(fork + "whole" + leaves_out + "--training.steps=9 --save=whole.safetensors", folder);
  run_well(fork + "parts" + leaves_out + "--training.steps=6", folder);
  const Outcome on =
      run_well(fork + "parts" + leaves_out + "--training.steps=9 --save=parts.safetensors", folder);
  CHECK_FALSE(has(on.out, "anew"));
  CHECK(folder.read("parts.safetensors") == folder.read("whole.safetensors"));
  // Which samples it sees may be others then.
  run_well(fork + "short" + leaves_out + "--training.steps=5 --training.seq_len=8", folder);
}

TEST_CASE("a run that has nothing to train says so") {
  const BookFolder folder;
  run_well(kResumed + "--training.steps=6", folder);
  for (const char* steps : {"4", "6"})
    CHECK(has(
        run_well(kResumed + "--training.steps=" + steps, folder).out,
        std::string("checkpoint: training.steps=") + steps + " are done, so nothing is trained\n"));
}

TEST_CASE("a default and its explicit value are one model") {
  const BookFolder folder;
  run_well(kResumed + "--training.steps=4", folder);
  const Outcome on = run_well(
      kResumed + "--training.steps=5 --model.tie_embeddings=false --model.n_kv_heads=2", folder);
  CHECK(has(on.out, "changed since: training.steps 4 -> 5\n"));
}

TEST_CASE("lines that no run has written are not lost by one that goes on") {
  const BookFolder folder;
  run_well(kResumed + "--training.steps=4", folder);
  const std::string lines = folder.read("out.jsonl");
  const std::size_t third = lines.find('\n', lines.find('\n') + 1) + 1;
  const std::string with = lines.substr(0, third) + "a note\n" + lines.substr(third);
  folder.write("out.jsonl", with);
  const Outcome run = run_command(kResumed + "--training.steps=6", folder.path().string());
  CHECK(run.exit_code == 2);
  CHECK(has(run.err, "metrics.jsonl: line 3 of 'out.jsonl' is not a step's"));
  CHECK(folder.read("out.jsonl") == with);
  // What a machine that failed has left at the end goes.
  folder.write("out.jsonl", lines + std::string(1000, '\0'));
  run_well(kResumed + "--training.steps=6", folder);
  CHECK(whole_lines(folder) == 6);
}
