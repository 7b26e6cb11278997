// Runs of several processes: whether they are one job, and how a launcher ends them.
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"
#include "tools/train/agreement.hpp"
#include "tools/train/flight_record_file.hpp"
#include "tools/train/signals.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("ranks that were started differently name the first difference", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const std::string where = folder.path().string();
  // Two files of weights that differ in their values alone, and two of data.
  const std::string makes = kTiny + "--training.steps=1 --save=";
  REQUIRE(run_command(makes + "1.safetensors && " + makes + "2.safetensors --debug.seed=2", where)
              .exit_code == 0);
  std::string other = folder.read("book.txt");
  other[3000] = '~';
  folder.write("other.txt", other);
  folder.write("longer.txt", other + "~");
  const std::string run = kTiny + "--training.steps=2 --save=a.safetensors ";
  const auto differs = [&](const std::string& first, const std::string& second,
                           const std::string& expected) {
    const Outcome outcome =
        run_command("mpirun -n 1 " + run + first + " : -n 1 " + run + second, where, kMpirun);
    INFO(first << " : " << second << '\n' << outcome.out << outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(has(outcome.err, expected));
    CHECK(has(outcome.err, "; start every rank alike\n"));
    CHECK_FALSE(std::filesystem::exists(folder / "a.safetensors"));
  };
  differs("", "--optimizer.lr=1", "optimizer.lr: ranks differ, rank 0 has 8e-04; ");
  differs("", "--load=1.safetensors", "the weights of --load: ranks differ, rank 0 has none; ");
  differs("--load=1.safetensors", "--load=2.safetensors", "the weights of --load: ranks differ, ");
  differs("", "--data.path=other.txt", "the contents of data.path: ranks differ, rank 0 has ");
  differs(
      "", "--data.path=longer.txt",
      "the tokens in data.path: ranks differ, rank 0 has " + std::to_string(other.size()) + "; ");
}

TEST_CASE("processes of a launcher that MPI does not know are no job", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const std::map<std::string, std::string> launchers[] = {
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}},
      {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}};
  for (const auto& variables : launchers) {
    const BookFolder folder;
    const Outcome outcome = run_command(kTiny + "--training.steps=1 --save=a.safetensors",
                                        folder.path().string(), variables);
    INFO(variables.begin()->first << outcome.out << outcome.err);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, "the launcher started 2 processes, MPI sees 1; start them with the "));
    CHECK_FALSE(std::filesystem::exists(folder / "a.safetensors"));
  }
}

TEST_CASE("ranks look at the tokens between them, at each once", "[threads]") {
  const TemporaryFolder folder;
  constexpr std::size_t kTokens = 100003;
  folder.write("tokens.bin", std::string(2 * kTokens, '\0'));
  train::Inputs inputs;
  inputs.loader.emplace(data::TokenFile(folder / "tokens.bin", 50, data::Scan::later),
                        data::LoaderOptions{.seq_len = 8});
  std::array<std::int64_t, 3> looked{};
  run_local(3, {.threads = 1}, [&](World& world) {
    looked[static_cast<std::size_t>(world.rank())] = train::look_at_tokens(inputs, &world);
  });
  for (const std::int64_t count : looked) CHECK(std::abs(count - std::int64_t{kTokens} / 3) <= 1);
  CHECK(looked[0] + looked[1] + looked[2] == std::int64_t{kTokens});
  CHECK(train::look_at_tokens(inputs) == std::int64_t{kTokens});
}

TEST_CASE("a failed collective whose flight record cannot be written is still one line") {
  train::hold_record_signal();
  const TemporaryFolder folder;
  train::FlightRecordFiles records(folder / "gone/record.json");
  const World world = World::single({});
  try {
    records.during(world, []() -> int { throw CommError("a rank is late"); });
    FAIL_CHECK("nothing was thrown");
  } catch (const CommError& error) {
    CHECK(has(error.what(), "a rank is late; comm.flight_record: "));
    CHECK(has(error.what(), "gone/record.0.json"));
  }
}

// Open MPI's passes SIGTERM on, and SIGINT as SIGTERM, and a second later, which is short on a busy
// machine, a SIGKILL; its own exit code is another matter.
TEST_CASE("a launcher that is told to end lets the ranks save", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  auto variables = kMpirun;
  variables["OMPI_MCA_odls_base_sigkill_timeout"] = "5";  // which it waits out
  for (const char* const signal : {"INT", "TERM"}) {
    const BookFolder folder;
    const Outcome outcome = run_command(
        "mpirun -n 2 " + kTiny + "--training.steps=1000000 --save=a.safetensors > log & run=$!; " +
            "until [ -s out.jsonl ]; do sleep 0.05; done; kill -" + signal + " $run; wait $run",
        folder.path().string(), variables);
    INFO(signal << ' ' << outcome.exit_code << outcome.err);
    CHECK(has(folder.read("a.safetensors"), "lm_head.weight"));
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      CHECK_FALSE(has(entry.path().string(), ".tmp-"));
  }
}

TEST_CASE("ranks that share the look at the data find the first bad token between them", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const Outcome outcome = run_command(
      "printf '~' | dd of=book.txt bs=1 seek=4000 conv=notrunc status=none; mpirun -n 2 " + kTiny +
          "--model.vocab_size=126 --training.steps=1",
      folder.path().string(), kMpirun);
  INFO(outcome.out << outcome.err);
  CHECK(outcome.exit_code == 2);
  CHECK(has(outcome.err, "data.path: token file 'book.txt' has id 126 at position 4000, beyond"));
  CHECK_FALSE(std::filesystem::exists(folder / "out.jsonl"));
}
