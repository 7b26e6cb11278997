// What a run writes, where it can't: stdout that is full or closed, a disk without room, files of
// an earlier run.
#include <filesystem>
#include <string>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

TEST_CASE("a full stdout ends a run with its metrics and its timeline written") {
  const BookFolder folder;
  const Outcome outcome =
      run_command(kTiny + "--training.steps=3 --trace=t.json > /dev/full", folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.err, "writing to stdout failed"));
  CHECK(whole_lines(folder) == 1);  // the step in which all ranks hear of it
  CHECK(has(folder.read("t.json"), "traceEvents"));
}

TEST_CASE("weights are saved where what the run says can no longer be written") {
  const std::string run = kTiny + "--ranks 2 --training.steps=1000000 --save=a.safetensors ";
  for (const std::string& command :
       {run + "--metrics.jsonl=/dev/full > log",
        "{ " + run + "; echo $? > code; } | head -1 > log; exit $(cat code)"}) {
    const BookFolder folder;
    const Outcome outcome = run_command(command, folder.path().string());
    INFO(command << ": " << outcome.err);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, " failed: "));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(has(folder.read("a.safetensors"), "lm_head.weight"));
  }
}

TEST_CASE("a stdout that is full ends a run, and leaves no flight record") {
  for (const std::string ranks : {"1", "2"}) {
    const BookFolder folder;
    const Outcome outcome =
        run_command(kTiny + "--training.steps=1000000 --ranks " + ranks + " > /dev/full",
                    folder.path().string());
    INFO(outcome.err);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, "stdout failed"));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK_FALSE(std::filesystem::exists(folder.path() / "flight_record.0.json"));
    CHECK_FALSE(std::filesystem::exists(folder.path() / "flight_record.1.json"));
  }
}

TEST_CASE("a run without a step leaves an older metrics file alone") {
  const BookFolder folder;
  folder.write("out.jsonl", "old\n");
  const Outcome outcome = run_command(kTiny + "--training.steps=0", folder.path().string());
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(folder.read("out.jsonl") == "old\n");
}

TEST_CASE("weights for which there is no room on the disk are refused before the first step") {
  const BookFolder folder;
  for (const std::string ranks : {"1", "2"}) {  // 130 TB
    const Outcome outcome = run_command(
        kTiny + "--model.dim=262144 --model.n_heads=2048 --model.n_layers=40 --training.steps=1 " +
            "--save=a.safetensors --ranks " + ranks,
        folder.path().string());
    INFO(outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(has(outcome.err, "--save: 'a.safetensors' needs "));
    CHECK(has(outcome.err, " free; name another folder\n"));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(folder.entries() == 1);
  }
}

TEST_CASE("a stdout that is closed is no file of the run's") {
  const BookFolder folder;
  const Outcome outcome =
      run_command(kTiny + "--training.steps=2 --trace=t.json >&-", folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.err, "writing to stdout failed"));
  for (const std::string file : {"out.jsonl", "t.json"})
    if (std::filesystem::exists(folder.path() / file))
      CHECK(folder.read(file).find_first_not_of("{[\n") != 0);
}

TEST_CASE("a second run does not write into the metrics file of the first") {
  const BookFolder folder;
  const Outcome outcome = run_command(
      kTiny + "--training.steps=1000000 > log & run=$!; until [ -s out.jsonl ]; do sleep 0.05; " +
          "done; " + kTiny + "--training.steps=1; code=$?; kill -INT $run; wait $run; exit $code",
      folder.path().string());
  CHECK(outcome.exit_code == 2);
  CHECK(outcome.err ==
        "tessera-train: metrics.jsonl: 'out.jsonl' cannot be written: another run is writing it; "
        "check the path\n");
  whole_lines(folder);
}
