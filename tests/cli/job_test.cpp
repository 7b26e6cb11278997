// Runs of several processes: whether they are one job, and how a launcher ends them.
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <tuple>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/free_port.hpp"
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

TEST_CASE("processes on two machines of a launcher that MPI does not know are no job", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  // srun without pmix gives MPI nothing to start by, so its ranks look for each other.
  const std::tuple<std::map<std::string, std::string>, const char*, const char*> launchers[] = {
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}},
       "100",  // MPI takes a second of its own to start
       "the launcher started 2 processes, MPI sees 1; start them with the "},
      {{{"SLURM_PROCID", "0"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_NODEID", "0"},
        {"SLURM_STEP_NODELIST", "localhost,n2"},
        {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}},
       "1",
       "rank 1 of 2 never came"}};
  for (const auto& [variables, timeout, says] : launchers) {
    const BookFolder folder;
    const Outcome outcome = run_command(
        kTiny + "--training.steps=1 --save=a.safetensors --comm.init_timeout_seconds=" + timeout,
        folder.path().string(), variables);
    INFO(variables.begin()->first << outcome.out << outcome.err);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, says));
    CHECK_FALSE(std::filesystem::exists(folder / "a.safetensors"));
  }
}

// What a process of a job by hand is told, on this machine.
std::map<std::string, std::string> seat(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port)}};
}

TEST_CASE("who waits in vain names the variable that it was given, and does not stay for seconds") {
  const BookFolder folder;
  const std::string port = std::to_string(free_port());
  const std::map<std::string, std::string> slurm = {{"SLURM_PROCID", "1"},
                                                    {"SLURM_STEP_NUM_TASKS", "2"},
                                                    {"SLURM_LOCALID", "1"},
                                                    {"SLURM_NODEID", "0"},
                                                    {"SLURM_STEP_NODELIST", "localhost"},
                                                    {"SLURM_STEP_TASKS_PER_NODE", "2"}};
  const std::map<std::string, std::string> own = {
      {"TESSERA_RANK", "1"}, {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_STORE", "127.0.0.1:" + port}};
  const std::pair<std::map<std::string, std::string>, std::string> jobs[] = {
      {seat(1, 2, std::stoi(port)), "(MASTER_ADDR=127.0.0.1, MASTER_PORT=" + port + ", run id"},
      {own, "(TESSERA_STORE=127.0.0.1:" + port + ", run id"},
      {slurm, "(host localhost of SLURM_STEP_NODELIST, port 61440 by SLURM_JOB_ID=0, run id"}};
  for (const auto& [variables, says] : jobs) {
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome =
        run_command(kTiny + "--comm.init_timeout_seconds=1", folder.path().string(), variables);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    INFO(outcome.err);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.err, says));
    CHECK(seconds < 6);  // 1 and a half; 7 where it waits for a turn that peers take
  }
}

TEST_CASE("who waits with rank 0, and is seen with it, leaves it to rank 0 to say who never came") {
  const BookFolder folder;
  auto variables = seat(0, 3, free_port());
  variables.erase("RANK");
  variables.erase("LOCAL_RANK");
  const std::string run = kTiny + "--training.global_batch_size=3 --comm.init_timeout_seconds=";
  const Outcome outcome =
      run_command("RANK=1 LOCAL_RANK=1 " + run + "100 2> 1.err & one=$!; " +
                      "RANK=0 LOCAL_RANK=0 " + run + "2 2> 0.err; echo $?; wait $one; echo $?",
                  folder.path().string(), variables);
  CHECK(outcome.out == "1\n1\n");
  CHECK(has(folder.read("0.err"), " of 3 never came; "));
  // Unless it had no seat yet when rank 0 gave up: then it says what it has seen.
  const std::string said = folder.read("1.err");
  CHECK((said.empty() || has(said, "has not found rank 0")));
}

TEST_CASE("what all ranks find alike is said by rank 0 for them") {
  const BookFolder folder;
  folder.write("seat.sh", "RANK=$1 LOCAL_RANK=0 exec " + kTiny + "--training.steps=1\n");
  auto variables = seat(0, 2, free_port());
  variables.erase("RANK");
  variables.erase("LOCAL_RANK");
  variables.erase("LOCAL_WORLD_SIZE");
  const Outcome outcome = run_command(
      "sh seat.sh 0 2> 0.err & zero=$!; sh seat.sh 1 2> 1.err; echo $?; wait $zero; echo $?",
      folder.path().string(), variables);
  CHECK(outcome.out == "2\n2\n");
  CHECK(has(folder.read("0.err"), "ranks 0 and 1 of one machine both have LOCAL_RANK=0; "));
  // As if it were on another machine, where torchrun's user sees no rank 0.
  CHECK(folder.read("1.err") == folder.read("0.err"));
}

TEST_CASE("a launcher's rank whose peer never comes to MPI_Init ends with a line", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const Outcome outcome = run_command("mpirun -n 1 " + kTiny +
                                          "--comm.init_timeout_seconds=1 --training.steps=1 : "
                                          "-n 1 sleep 600",
                                      folder.path().string(), kMpirun);
  INFO(outcome.out << outcome.err);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.err,
            "World::mpi has waited for ranks that have not come for 1 s, the time for that "
            "(init_timeout_seconds)"));
}

// The agent is a shell here; to be killed it needs no more.
TEST_CASE("a rank of torchrun ends in order when torchrun has been killed, and no other's does") {
  for (const bool is_torchrun : {true, false}) {
    const BookFolder folder;
    auto variables = seat(0, 1, 29500);
    if (is_torchrun) variables["TORCHELASTIC_RUN_ID"] = "none";
    const std::string done =
        is_torchrun ? "grep -q SIGTERM out || [ $((n += 1)) = 1200 ]" : "[ $((n += 1)) = 40 ]";
    const Outcome outcome = run_command(
        "sh -c '" + kTiny +
            "--training.steps=100000000 > out 2> err & echo $! > rank; wait' & agent=$!; "
            "until [ -s out.jsonl ]; do sleep 0.05; done; kill -KILL $agent; n=0; "
            "until " +
            done +
            "; do sleep 0.05; done; "
            "before=$(wc -l < out.jsonl); sleep 0.2; "
            "if [ $(wc -l < out.jsonl) -gt $before ]; then echo trains; fi; "
            "kill -KILL $(cat rank) 2> none; true",
        folder.path().string(), variables);
    INFO(outcome.err << folder.read("err"));
    CHECK(has(folder.read("err"), "is gone; this rank ends as by SIGTERM\n") == is_torchrun);
    CHECK(has(folder.read("out"), "stopped by SIGTERM") == is_torchrun);
    CHECK(has(outcome.out, "trains") == !is_torchrun);
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

TEST_CASE("where a rank hangs its flight record is written before the process ends") {
  train::hold_record_signal();
  const TemporaryFolder folder;
  train::FlightRecordFiles records(folder / "record.json");
  const World world = World::single({});
  records.write_all("too early");
  CHECK_FALSE(std::filesystem::exists(folder / "record.0.json"));
  records.during(world, [&] {
    records.write_all("a thread hangs");
    return 0;
  });
  std::ifstream written(folder / "record.0.json");
  CHECK(has(std::string(std::istreambuf_iterator<char>(written), {}), "a thread hangs"));
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

TEST_CASE("jobs of any number of ranks go on with each other's runs", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const std::string run = kTiny + "--training.global_batch_size=6 --checkpoint.enable=true ";
  const auto goes_to = [&](const std::string& launcher, int step) {
    const Outcome outcome = run_command(launcher + run + "--training.steps=" + std::to_string(step),
                                        folder.path().string(), kMpirun);
    INFO(launcher << '\n' << outcome.out << outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK(whole_lines(folder) == step);
    return outcome.out;
  };
  goes_to("mpirun -n 3 ", 2);
  CHECK(has(goes_to("mpirun -n 2 ", 4),
            "goes on after step 2 of 'checkpoint/step-2', which 3 ranks saved"));
  CHECK(has(goes_to("mpirun -n 3 ", 6), "step-4', which 2 ranks saved"));
  CHECK(has(goes_to("", 7), "step-6', which 3 ranks saved"));
  CHECK(has(goes_to("mpirun -n 2 ", 8), "step-7', which 1 rank saved"));
}

TEST_CASE("a folder of checkpoints that not every rank sees is bad input", "[mpi]") {
  if (std::string(TESSERA_MPIRUN).empty()) return;
  const BookFolder folder;
  const std::string here = folder / "here", there = folder / "there";
  std::filesystem::create_directory(here);
  std::filesystem::create_directory(there);
  const std::string run =
      kTiny + "--checkpoint.enable=true --training.steps=2 --data.path=" + (folder / "book.txt") +
      " --metrics.jsonl=" + (folder / "out.jsonl");
  // One path that leads elsewhere on each rank, as a disk of its own does.
  const Outcome outcome =
      run_command("mpirun -n 1 -wdir " + here + " tessera-train " + run.substr(14) +
                      " : -n 1 -wdir " + there + " tessera-train " + run.substr(14),
                  folder.path().string(), kMpirun);
  INFO(outcome.out << outcome.err);
  CHECK(outcome.exit_code == 2);
  CHECK(
      has(outcome.err, "checkpoint.folder: 'checkpoint' is another folder here than on rank 0: "));
  CHECK(has(outcome.err, "is not there; name a folder that all ranks share\n"));
  CHECK(std::filesystem::is_empty(here + "/checkpoint"));
  CHECK(std::filesystem::is_empty(there));
}
