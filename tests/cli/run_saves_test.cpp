// Which checkpoints a run saves and keeps, in a folder of its own, and how it ends where it can't.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/cli/resumable_run.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

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
