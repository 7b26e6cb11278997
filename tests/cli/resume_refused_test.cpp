// Checkpoints that a run does not go on from, which are refused before anything is lost.
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>

#include "tests/checkpoint/saved_files.hpp"
#include "tests/cli/resumable_run.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

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
