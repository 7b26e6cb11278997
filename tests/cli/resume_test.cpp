// Runs that go on where another was: the bits of the one that nobody interrupted, on any ranks, and
// refusals that lose nothing.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include "tests/checkpoint/saved_files.hpp"
#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

const std::string kResumed = kTiny + "--checkpoint.enable=true --checkpoint.interval=4 ",
                  kAsync = "--checkpoint.async_mode=async ";

Outcome run_well(const std::string& command, const TemporaryFolder& folder) {
  const Outcome run = run_command(command, folder.path().string());
  INFO(command << '\n' << run.out << run.err);
  REQUIRE(run.exit_code == 0);
  return run;
}

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

TEST_CASE("a checkpoint that can't be saved ends the run in order, with its weights saved") {
  const BookFolder folder;
  const std::string mode = GENERATE(as<std::string>{}, "", kAsync);
  const Outcome run = run_command(
      kResumed + mode +
          "--ranks 2 --training.steps=1000000 --checkpoint.interval=50 --save=w.safetensors "
          "> log & run=$!; until [ -e checkpoint/step-100 ]; do sleep 0.05; done; "
          "kill -STOP $run; mv checkpoint gone; touch checkpoint; kill -CONT $run; wait $run",
      folder.path().string());
  INFO(run.err << folder.read("log"));
  CHECK(run.exit_code == 1);
  CHECK(has(run.err, ": Not a directory\n"));
  CHECK_FALSE(folder.read("w.safetensors").empty());
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

TEST_CASE("a run keeps its newest checkpoints, and saves before it stops") {
  const BookFolder folder;
  run_well(kResumed +
               "--ranks 2 --training.steps=13 --checkpoint.keep_latest_k=2 "
               "--checkpoint.enable_first_step_checkpoint=true",
           folder);
  for (const int step : {1, 4, 8, 12, 13}) {
    INFO(step);
    CHECK(std::filesystem::exists(folder.path() / ("checkpoint/step-" + std::to_string(step))) ==
          (step >= 12));
  }
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path() / "checkpoint"), {}) == 2);
}

TEST_CASE(
    "a run saves beside its steps, in memory that was planned, and finishes that at its stop") {
  const BookFolder folder;
  const Outcome stopped = run_command(
      kResumed + kAsync +
          "--ranks 2 --training.steps=1000000 --checkpoint.interval=50 > log & run=$!; "
          "until [ -e checkpoint/step-100 ]; do sleep 0.05; done; kill -TERM $run; wait $run",
      folder.path().string());
  INFO(stopped.err);
  CHECK(stopped.exit_code == 128 + SIGTERM);
  const std::string log = folder.read("log"), after = "stopped by SIGTERM after step ";
  INFO(log);
  const std::size_t at = log.find(after);
  REQUIRE(at != log.npos);
  const std::string last = std::to_string(std::stoi(log.substr(at + after.size())));
  CHECK(has(log, "checkpoint: step 50 is in 'checkpoint/step-50', "));
  CHECK(has(log.substr(0, at),
            "checkpoint: step " + last + " is in 'checkpoint/step-" + last + "', "));
  CHECK(has(log, "as planned; 2 of 2 ranks as in their plans"));
  const std::string host = log.substr(log.find("on the host: planned peak "));
  const std::int64_t planned = std::stoll(host.substr(host.find("peak ") + 5));
  CHECK(planned > 0);
  CHECK(has(host, " used " + std::to_string(planned) + " bytes"));
  CHECK(whole_lines(folder) == std::stoi(last));
  CHECK(has(
      run_well(kResumed + kAsync + "--ranks 3 --training.global_batch_size=6 --training.steps=" +
                   std::to_string(std::stoi(last) + 1),
               folder)
          .out,
      "goes on after step " + last));

  const Outcome plan = run_well(
      "tessera-train --model.dim=16 --model.n_layers=1 --model.n_heads=2 --training.seq_len=16 "
      "--training.global_batch_size=4 --checkpoint.enable=true --ranks 2 --dry-run " +
          kAsync,
      folder);
  CHECK(has(plan.out, "on the host: planned peak " + std::to_string(planned) + " bytes"));
  CHECK(has(plan.out, "checkpoint staging"));
}

TEST_CASE("checkpoints that would have no room are bad input before the first step") {
  const BookFolder folder;
  // A checkpoint is a third of what is free, in 12 bytes for each of 2 x 4096 weights of a token.
  const std::uintmax_t tokens = std::min<std::uintmax_t>(
      1 << 24, std::filesystem::space(folder.path()).available / 3 / (12 * 2 * 4096));
  const auto refused = [&](const std::string& options) {
    const Outcome run =
        run_command(kResumed + "--model.dim=4096 --model.n_heads=32 --model.vocab_size=" +
                        std::to_string(tokens) + options,
                    folder.path().string());
    INFO(run.out << run.err);
    CHECK(run.exit_code == 2);
    return run.err;
  };
  CHECK(has(refused(" --training.steps=400"),
            "tessera-train: checkpoint.keep_latest_k=10, so room for 11 more checkpoints: "
            "'checkpoint' needs "));
  CHECK(has(refused(" --training.steps=20 --checkpoint.keep_latest_k=0"), "room for 5 more"));
}

TEST_CASE("what is not finite is never saved as a checkpoint, which is no bad input") {
  const BookFolder folder;
  const std::string mode = GENERATE(as<std::string>{}, "", kAsync);
  run_well(kResumed + "--ranks 2 --training.steps=4", folder);
  const Outcome run = run_command(
      kResumed + mode +
          "--ranks 2 --training.steps=5 --optimizer.lr=3e38 --optimizer.weight_decay=50",
      folder.path().string());
  INFO(run.out << run.err);
  CHECK(run.exit_code == 1);
  CHECK(has(run.err,
            "training.stop_on_nan: step 5: checkpoint::save: 'model.embed_tokens.weight' "
            "is not finite, and nothing is saved; lower optimizer.lr"));
  CHECK(std::filesystem::exists(folder.path() / "checkpoint/step-4/manifest.json"));
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path() / "checkpoint"), {}) == 1);
}

TEST_CASE("a checkpoint that does not fit is bad input, and stays") {
  const BookFolder folder;
  run_well(kResumed + "--ranks 2 --training.steps=6", folder);
  const std::string metrics = folder.read("out.jsonl");
  const auto refused = [&](const std::string& options) {
    const Outcome run = run_command(kResumed + options, folder.path().string());
    INFO(options << '\n' << run.out << run.err);
    CHECK(run.exit_code == 2);
    CHECK(run.out.empty());
    CHECK(folder.read("out.jsonl") == metrics);
    return run.err;
  };
  const std::string goes = "--ranks 2 --training.steps=9 ";
  CHECK(has(refused(goes + "--model.dim=8"),
            "tessera-train: model.dim: 'checkpoint/step-6' was made with 16, this run has 8; give "
            "the same value, or name another checkpoint.folder\n"));
  CHECK(has(refused(goes + "--debug.seed=3"), "debug.seed: "));
  CHECK(has(refused(goes + "--data.heldout=0.2"), "data.heldout: "));
  CHECK(has(refused(goes + "--training.seq_len=8"), "training.seq_len: "));
  CHECK(has(refused(goes + "--optimizer.name=SGD"), "optimizer.name: "));
  folder.write("other.txt", folder.read("book.txt") + "more");
  CHECK(has(refused(goes + "--data.path=other.txt"), "the contents of data.path: "));
  CHECK(has(refused(goes + "--checkpoint.load_step=4"),
            "checkpoint.load_step=4: 'checkpoint' has step 6, so the steps between would be "
            "written twice"));
  CHECK(has(refused(goes + "--checkpoint.load_step=7"), "'checkpoint/step-7' does not exist"));
  CHECK(has(refused(goes + "--checkpoint.folder=none --checkpoint.load_step=7"),
            "'none' has no checkpoint"));
  CHECK(has(refused(goes + "--checkpoint.folder=none --checkpoint.load_step=4 "
                           "--checkpoint.initial_load_path=checkpoint/step-6"),
            "checkpoint.load_step=4: 'checkpoint/step-6' is step 6 alone"));
  CHECK(has(refused(goes + "--checkpoint.folder=none --debug.seed=3 "
                           "--checkpoint.initial_load_path=checkpoint"),
            "name another checkpoint.initial_load_path"));
  CHECK(has(refused(goes + "--checkpoint.exclude_from_loading=optimizer"),
            "a run goes on in its folder with all it has"));
  CHECK(has(refused(goes + "--save=checkpoint"),
            "--save: 'checkpoint' would overwrite "
            "checkpoint.folder"));
  CHECK(has(refused(goes + "--checkpoint.folder=book.txt"), "'book.txt' is no folder"));
  CHECK(has(refused(goes + "--checkpoint.folder=none --checkpoint.initial_load_path=nowhere"),
            "checkpoint.initial_load_path: checkpoint 'nowhere' does not exist"));
  CHECK_FALSE(std::filesystem::exists(folder.path() / "none"));
  std::string manifest = folder.read("checkpoint/step-6/manifest.json");
  manifest[40] ^= 1;
  folder.write("checkpoint/step-6/manifest.json", manifest);
  CHECK(has(refused(goes),
            "manifest.json' has changed since it was written; take another checkpoint"));
}

TEST_CASE("a newest step that cannot be read is refused, and no older one taken for it") {
  const BookFolder folder;
  run_well(kResumed + "--ranks 2 --training.steps=8 --save=at-8.safetensors", folder);
  const auto shell = [&](const std::string& command) {
    REQUIRE(run_command(command, folder.path().string()).exit_code == 0);
  };
  shell("chmod 755 . && mkdir other && cp book.txt other && chmod -R 777 other");
  const std::string goes = "--ranks 2 --training.steps=10 ", step = "checkpoint/step-8",
                    forked = goes +
                             "--checkpoint.folder=fork --checkpoint.initial_load_path="
                             "checkpoint ",
                    before = "'checkpoint/step-8' is newer than all checkpoints and ",
                    move =
                        "; move it away, or load another step by its number and save nothing "
                        "here\n";
  const std::pair<std::string, std::string> broken[] = {
      {"rm checkpoint/step-8/manifest.json", "has no manifest.json"},
      {"rm -r checkpoint/step-8/*", "has no manifest.json"},
      {"rm -r checkpoint/step-8 && touch checkpoint/step-8", "is no folder"},
      {"rm -r checkpoint/step-8 && mkfifo checkpoint/step-8", "is no folder"},
      {"rm -r checkpoint/step-8 && ln -s none checkpoint/step-8", "is a link to nothing"},
      {"rm checkpoint/step-8/manifest.json && mkdir checkpoint/step-8/manifest.json",
       "has a manifest.json that is no file"}};
  shell("cp -r checkpoint kept");
  for (const auto& [command, why_not] : broken) {
    INFO(command);
    shell("rm -rf checkpoint && cp -r kept checkpoint && " + command);
    for (const std::string& options : {goes, goes + "--checkpoint.load_only=true ", forked,
                                       goes + "--checkpoint.load_step=4 "}) {
      INFO(options);
      const Outcome run = run_command(kResumed + options, folder.path().string());
      INFO(run.out << run.err);
      CHECK(run.exit_code == 2);
      CHECK(run.out.empty());
      CHECK(run.err == "tessera-train: checkpoint." +
                           std::string(options == forked ? "initial_load_path" : "folder") + ": " +
                           before + why_not + move);
    }
    CHECK(whole_lines(folder) == 8);
  }
  CHECK(has(run_well(kTiny + goes +
                         "--checkpoint.enable=true --checkpoint.load_only=true "
                         "--checkpoint.load_step=4",
                     folder)
                .out,
            "goes on after step 4"));
  CHECK(has(run_well(kResumed + forked + "--checkpoint.load_step=4", folder).out,
            "goes on after step 4"));

  // Of another user.
  shell(
      "rm -rf checkpoint && cp -r kept checkpoint && chmod 777 checkpoint && "
      "chmod 700 checkpoint/step-8 && touch out.jsonl && chmod 666 out.jsonl");
  if (::geteuid() == 0) {
    const Outcome run =
        run_command("cd other && setpriv --reuid=65534 --regid=65534 --clear-groups " + kResumed +
                        goes + "--checkpoint.folder=../checkpoint --checkpoint.load_only=true",
                    folder.path().string());
    INFO(run.out << run.err);
    CHECK(run.exit_code == 2);
    CHECK(has(run.err,
              "step-8' is newer than all checkpoints and cannot be looked into: "
              "Permission denied; move it away"));
  }

  // Another's number, of 63 bits.
  shell(
      "rm -rf checkpoint && cp -r kept checkpoint && "
      "cp -r checkpoint/step-8 checkpoint/step-9223372036854775807");
  const Outcome copied = run_command(kResumed + goes, folder.path().string());
  INFO(copied.out << copied.err);
  CHECK(copied.exit_code == 2);
  CHECK(has(copied.err,
            "checkpoint 'checkpoint/step-9223372036854775807' is of step 8 by its "
            "manifest; name its folder step-8\n"));
}

TEST_CASE("one run at a time has a folder, and a killed one leaves it at once") {
  const BookFolder folder;
  const std::string endless = kResumed +
                              "--ranks 2 --training.steps=1000000 --checkpoint.interval=1000000 "
                              "--checkpoint.enable_first_step_checkpoint=true ";
  const Outcome both = run_command(
      endless + "> log & run=$!; until [ -e checkpoint/step-1 ]; do sleep 0.05; done; " + kResumed +
          "--ranks 2 --training.steps=4 --checkpoint.folder=./checkpoint "
          "--metrics.jsonl=other.jsonl > second; echo $? > code; kill -0 $run || echo gone; "
          // What only reads needs no lock.
          "tessera-checkpoint verify checkpoint/step-1 > verified; echo $? >> code; " +
          kResumed +
          "--ranks 2 --training.steps=5 --checkpoint.folder=fork --metrics.jsonl=fork.jsonl "
          "--checkpoint.initial_load_path=checkpoint --checkpoint.load_step=1 > forked; "
          "echo $? >> code; kill -KILL $run; wait $run",
      folder.path().string());
  INFO(both.out << both.err);
  CHECK(both.exit_code == 128 + SIGKILL);
  CHECK(both.out.empty());
  CHECK(folder.read("code") == "2\n0\n0\n");
  CHECK(folder.read("second").empty());
  CHECK(
      has(both.err,
          "tessera-train: checkpoint.folder: './checkpoint' is in use by another run, which saves "
          "checkpoints there; wait for its end, or name another folder\n"));
  CHECK(has(run_well(kResumed + "--ranks 2 --training.steps=5", folder).out,
            "goes on after step 1 "));
}

TEST_CASE("a manifest that says what no run has done is bad input, though its checksum is right") {
  const BookFolder folder;
  run_well(kResumed + "--ranks 2 --training.steps=6", folder);
  const std::string path = "checkpoint/step-6/manifest.json", good = folder.read(path);
  struct Lie {
    std::string old, with, said;
  };
  const std::string steps = "says of its optimizer that it has made ",
                    samples = "checkpoint 'checkpoint/step-6' says that ";
  for (const Lie& lie : {
           Lie{"\"config.model.dim\": \"16\"", "\"config.model.dim\": 16",
               "scalar 'config.model.dim' is no text"},
           Lie{"\"config.optimizer.lr\": \"", "\"config.optimizer.lr\": true, \"x\": \"",
               "scalar 'config.optimizer.lr' is no text"},
           Lie{"\"samples\": 24", "\"samples\": -1", samples + "-1 samples were taken"},
           Lie{"\"samples\": 24", "\"samples\": 9223372036854775807",
               samples + "9223372036854775807 samples were taken"},
           Lie{"\"steps\": 6", "\"steps\": -1", steps + "-1 steps, expected 0 to"},
           Lie{"\"steps\": 6", "\"steps\": 9223372036854775807",
               steps + "9223372036854775807 steps, expected 0 to"},
           Lie{"\"steps\": 6", "\"steps\": 5", steps + "5 steps, and tensor '"},
       }) {
    folder.write(path, sealed(replaced(good, lie.old, lie.with)));
    const Outcome run =
        run_command(kResumed + "--ranks 2 --training.steps=9", folder.path().string());
    INFO(lie.with << '\n' << run.out << run.err);
    CHECK(run.exit_code == 2);
    CHECK(run.out.empty());
    CHECK(has(run.err, "checkpoint.folder: checkpoint 'checkpoint/step-6'"));
    CHECK(has(run.err, lie.said));
  }
  folder.write(path, sealed(good));
  run_well(kResumed + "--ranks 2 --training.steps=9", folder);
}

TEST_CASE("the folder of a run's checkpoints may have any name, and is no checkpoint itself") {
  const BookFolder folder;
  const Outcome run = run_well(
      kResumed + "--training.steps=1 --checkpoint.folder=\"$(printf 'a\\nb\\033[31m')\"", folder);
  CHECK(has(run.out, "checkpoint: step 1 is in 'a?b?[31m/step-1', "));
  CHECK(run.out.find('\033') == run.out.npos);

  run_well(kResumed + "--training.steps=1", folder);
  const Outcome loaded =
      run_command(kTiny + "--training.steps=1 --load=checkpoint/", folder.path().string());
  CHECK(loaded.exit_code == 2);
  CHECK(loaded.err ==
        "tessera-train: --load: 'checkpoint/' is a folder of checkpoints; name one in "
        "it, as 'checkpoint/step-1'\n");
  const Outcome inspected =
      run_command("tessera-checkpoint inspect checkpoint", folder.path().string());
  CHECK(inspected.exit_code == 2);
  CHECK(has(inspected.err,
            "has no manifest.json; name a checkpoint in it, as 'checkpoint/step-1'\n"));
}

TEST_CASE("ranks that may open no file say one thing, and leave nothing") {
  const BookFolder folder;
  for (int files = 4; files <= 6; ++files) {
    const Outcome run = run_command(
        "ulimit -n " + std::to_string(files) + "; " + kResumed + "--training.steps=1 --ranks 4",
        folder.path().string());
    INFO(files << '\n' << run.out << run.err);
    CHECK(std::count(run.err.begin(), run.err.end(), '\n') == (run.exit_code == 0 ? 0 : 1));
    if (std::filesystem::exists(folder / "checkpoint"))
      for (const auto& entry : std::filesystem::directory_iterator(folder / "checkpoint"))
        CHECK(entry.path().filename().string().starts_with("step-"));
    std::filesystem::remove_all(folder / "checkpoint");
  }
}
