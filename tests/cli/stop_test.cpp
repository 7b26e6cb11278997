// How runs end that are stopped, or that a limit of the system stops.
#include <sys/types.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// A run that nobody stops, whose lines nobody reads, from when their pipe is full, which is so once
// two looks at the metrics find the same.
const std::string kUnread =
    "mkfifo lines; exec 3<>lines; " + kTiny +
    "--training.steps=1000000 --save=a.safetensors > lines & run=$!; old=none; "
    "until new=$(stat -c %s out.jsonl 2>&-); [ \"$new\" ] && [ $new = $old ] && "
    "[ $new -gt 65536 ]; do old=${new:-none}; sleep 0.3; done; ";

}  // namespace

TEST_CASE("a second signal ends a run at once") {
  const BookFolder folder;
  // A stopped process takes both signals when it goes on, not always in one thread: an orderly end
  // waits a tenth of a second for each of its lines before it saves.
  const Outcome outcome = run_command(
      kUnread + "kill -STOP $run; kill -INT $run; kill -TERM $run; kill -CONT $run; wait $run",
      folder.path().string());
  const bool ended = outcome.exit_code == 128 + SIGINT || outcome.exit_code == 128 + SIGTERM;
  CHECK(ended);
  CHECK_FALSE(std::filesystem::exists(folder / "a.safetensors"));
}

TEST_CASE("a small limit on the stack ends neither a run nor a plan") {
  const BookFolder folder;
  for (const char* options : {"--ranks 2 --training.steps=2", "--training.steps=2"}) {
    const Outcome outcome =
        run_command("ulimit -S -s 256; timeout 60 " + kTiny + options, folder.path().string());
    INFO(options << outcome.err);
    CHECK(outcome.exit_code == 0);
  }
}

TEST_CASE("a signal ends a run whose lines nobody reads any more, and its weights are saved") {
  const BookFolder folder;
  const Outcome outcome =
      run_command(kUnread + "kill -TERM $run; wait $run", folder.path().string());
  INFO(outcome.err);
  CHECK(outcome.exit_code == 128 + SIGTERM);
  CHECK(has(folder.read("a.safetensors"), "lm_head.weight"));
}

TEST_CASE("a hang-up ends a run in order, unless it is ignored") {
  const std::string run = kTiny + "--ranks 2 --save=a.safetensors ";
  const std::string hang_up =
      "> log & run=$!; until [ -s out.jsonl ]; do sleep 0.05; done; kill -HUP $run; wait $run";
  {
    const BookFolder folder;
    // Whoever runs the tests may have said nohup.
    const Outcome outcome =
        run_command("env --default-signal=HUP " + run + "--training.steps=1000000 " + hang_up,
                    folder.path().string());
    CHECK(outcome.exit_code == 128 + SIGHUP);
    CHECK(has(folder.read("log"), "stopped by SIGHUP after step "));
    CHECK(has(folder.read("a.safetensors"), "lm_head.weight"));
  }
  const BookFolder folder;
  const Outcome outcome = run_command("trap '' HUP; " + run + "--training.steps=200 " + hang_up,
                                      folder.path().string());
  CHECK(outcome.exit_code == 0);
  CHECK(whole_lines(folder) == 200);
}

TEST_CASE("a limit on addresses is kept to, and named where it is met") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const Outcome small =
      run_command("ulimit -v 2000000; " + kTiny + "--ranks 2 --training.steps=1", where);
  INFO(small.err);
  CHECK(small.exit_code == 0);
  const Outcome large = run_command(
      "ulimit -v 1000000; " + kTiny +
          "--training.steps=1 --model.dim=4096 --model.n_heads=64 --training.global_batch_size=1",
      where);
  CHECK(large.exit_code == 1);
  CHECK(has(large.err, "; the process may have 1024000000 bytes of addresses (ulimit -v); make"));
  CHECK(std::count(large.err.begin(), large.err.end(), '\n') == 1);
}

TEST_CASE("a limit on the size of files is a line, and leaves no part of a file") {
  const BookFolder folder;
  const Outcome outcome = run_command(
      "ulimit -f 8; " + kTiny + "--training.steps=1 --save=a.safetensors", folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.err == "tessera-train: 'a.safetensors' could not be written: File too large\n");
  CHECK_FALSE(std::filesystem::exists(folder / "a.safetensors"));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    CHECK_FALSE(has(entry.path().string(), ".tmp-"));
}

TEST_CASE("a limit on the size of files ends the metrics with a whole line") {
  const BookFolder folder;
  const Outcome outcome =
      run_command("ulimit -f 2; " + kTiny + "--training.steps=30", folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.err ==
        "tessera-train: metrics.jsonl: writing 'out.jsonl' failed: File too large\n");
  CHECK(whole_lines(folder) > 0);
  CHECK(whole_lines(folder) < 30);
}

TEST_CASE("files that may not be opened by the end of a run are its failure, not bad input") {
  const BookFolder folder;
  // The folder goes once the run has begun.
  const Outcome outcome = run_command(
      "mkdir gone; " + kTiny +
          "--training.steps=1000000 --save=gone/a.safetensors > log & run=$!; until [ -s out.jsonl "
          "]; do sleep 0.05; done; rmdir gone; kill -TERM $run; wait $run",
      folder.path().string());
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.err, "'gone/a.safetensors' cannot be written: the folder 'gone'"));
}

TEST_CASE("too few open files are a line and no part of a file, wherever they run out") {
  for (int files = 4; files < 16; ++files) {
    const BookFolder folder;
    const Outcome outcome = run_command("ulimit -n " + std::to_string(files) + "; " + kTiny +
                                            "--ranks 4 --training.steps=1 --save=a.safetensors",
                                        folder.path().string());
    INFO(files << ": " << outcome.exit_code << ' ' << outcome.err);
    if (outcome.exit_code == 127) continue;  // the loader's own
    CHECK(outcome.exit_code <= 2);
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == (outcome.exit_code != 0));
    CHECK(std::filesystem::exists(folder / "a.safetensors") == (outcome.exit_code == 0));
    if (outcome.exit_code == 2) CHECK_FALSE(std::filesystem::exists(folder / "out.jsonl"));
  }
}

TEST_CASE("too few addresses are a line and no crash, wherever they run out") {
  const BookFolder folder;
  GridShare share;
  for (int kib = 60000; kib < 200000; kib += 7000) {  // where two ranks get to, in small steps
    if (!share.takes()) continue;
    const Outcome outcome = run_command("ulimit -c 0; ulimit -v " + std::to_string(kib) + "; " +
                                            kTiny + "--ranks 2 --training.steps=1",
                                        folder.path().string());
    INFO(kib << ": " << outcome.err);
    // Where it has none for a thread's variables the C library ends the process itself.
    if (outcome.exit_code == 134 && outcome.err.starts_with("Fatal glibc error: ")) continue;
    CHECK(outcome.exit_code <= 1);
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == outcome.exit_code);
  }
}

TEST_CASE("one signal ends sampling and planning at once") {
  const BookFolder folder;
  const std::string model = "tessera-train --model.dim=16 --model.n_layers=1 --model.n_heads=2 ",
                    stop = "kill -INT $run; wait $run";
  const Outcome sampling = run_command(
      model +
          "--training.steps=0 --save=saved --sample x --sample-tokens=16777216 > log & run=$!; "
          "until [ -s saved ]; do sleep 0.05; done; " +
          stop,
      folder.path().string());
  CHECK(sampling.exit_code == 128 + SIGINT);
  CHECK(sampling.err.empty());
  const Outcome planning = run_command(
      model +
          "--dry-run --training.global_batch_size=16777216 --training.local_batch_size=1 > log "
          "& run=$!; until [ -s log ]; do sleep 0.05; done; " +
          stop,
      folder.path().string());
  CHECK(planning.exit_code == 128 + SIGINT);
  CHECK(planning.err.empty());
}

TEST_CASE("a long look at the data says how far it is, and one signal ends it") {
  const BookFolder folder;
  const Outcome outcome = run_command(
      "truncate -s 1T large.bin; tessera-train --model.dim=16 --model.n_layers=1 "
      "--model.n_heads=2 --model.vocab_size=1000 --data.path=large.bin > log & run=$!; until [ -s "
      "log ]; do sleep 0.05; done; kill -INT $run; wait $run",
      folder.path().string());
  CHECK(outcome.exit_code == 128 + SIGINT);
  CHECK(outcome.err.empty());
  CHECK(folder.read("log") == "data large.bin: looked at 0% of its 549755813888 tokens\n");
}

TEST_CASE("a signal that one rank alone is sent ends all with its code", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const std::string run = kTiny + "--training.steps=1000000 --metrics.log_freq=1000000";
  // No rank of mpirun's ends in failure, so that it leaves the other alone.
  folder.write("signalled", run +
                                " & run=$!; until [ -s out.jsonl ]; do sleep 0.05; done; "
                                "kill -INT $run; wait $run; echo $? > signalled.code");
  folder.write("other", run + "; echo $? > other.code");
  const Outcome outcome =
      run_command("mpirun -n 1 sh other : -n 1 sh signalled", folder.path().string(), kMpirun);
  INFO(outcome.out << outcome.err);
  CHECK(has(outcome.out, "stopped by SIGINT after step "));
  CHECK(folder.read("other.code") == "130\n");
  CHECK(folder.read("signalled.code") == "130\n");
}
