// The binary as a whole: what it answers without training, and how it meets closed streams and
// launchers.
#include <string>

#include "tessera/base/error.hpp"
#include "tessera/version.hpp"
#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE(
    "--help and --version answer on stdout, whatever stands behind them and in the environment") {
  const TemporaryFolder folder;
  const std::string where = folder.path().string();
  for (const char* command :
       {"tessera-train --help", "tessera-train -h", "tessera-train --ranks 2 --help --nonsense",
        "RANK=0 tessera-train --help", "tessera-train --help=all"}) {
    const Outcome help = run_command(command, where);
    INFO(command);
    CHECK(help.exit_code == 0);
    CHECK(help.err.empty());
    CHECK(has(help.out, "--training.global_batch_size"));
    CHECK(has(help.out, "Exit codes"));
  }
  const Outcome version = run_command("tessera-train --version", where);
  CHECK(version.exit_code == 0);
  CHECK(version.out.starts_with("tessera-train " TESSERA_VERSION "\ncommit "));
  CHECK(has(version.out, "\ncompiler "));
  CHECK(has(version.out, "\nfeatures "));
}

TEST_CASE("a printed configuration is read back to the same one") {
  const TemporaryFolder folder;
  const std::string command =
      "tessera-train --model.name=gpt2 --optimizer.lr=0.1 --data.path='a \"b\"\\c' --print-config "
      "> a.toml && "
      "tessera-train a.toml --print-config > b.toml && cmp a.toml b.toml && cat b.toml";
  const Outcome outcome = run_command(command, folder.path().string());
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  CHECK(has(outcome.out, "path = \"a \\\"b\\\"\\\\c\"\n"));
  CHECK(has(outcome.out, "lr = 0.1\n"));
}

TEST_CASE("a printed strategy does not contradict what it stands for") {
  const TemporaryFolder folder;
  for (const char* const strategy : {"ddp", "zero1", "zero2", "zero3",
                                     "hybrid --parallelism.data_parallel_replicate_degree=2"}) {
    INFO(strategy);
    const std::string command = concat(
        "echo some text > a.txt && tessera-train --ranks 4 --data.path=a.txt "
        "--parallelism.strategy=",
        strategy,
        " --print-config > a.toml && tessera-train a.toml --dry-run --ranks 4 "
        "--model.dim=32 --model.n_layers=1 --training.seq_len=2");
    const Outcome outcome = run_command(command, folder.path().string());
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.err.empty());
  }
}

TEST_CASE("a Slurm allocation without a step gives one notice and runs alone") {
  const TemporaryFolder folder;
  folder.write("book.txt", std::string(300, 'a'));
  const Outcome outcome = run_command(
      "SLURM_JOB_ID=7 tessera-train --dry-run --model.n_layers=1 --model.dim=32 "
      "--data.path=book.txt",
      folder.path().string());
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.err ==
        "tessera-train: notice: SLURM_JOB_ID=7 is a Slurm allocation without a step: this process "
        "runs alone; start several with srun or mpirun\n");
  CHECK(folder.entries() == 1);  // a dry run writes nothing
}

TEST_CASE("a full stdout is a failure, not a silence") {
  const TemporaryFolder folder;
  for (const char* command :
       {"tessera-train --help > /dev/full", "tessera-train --dry-run > /dev/full",
        "tessera-train --dry-run >&-"}) {
    const Outcome outcome = run_command(command, folder.path().string());
    INFO(command);
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.err == "tessera-train: writing to stdout failed\n");
  }
}
