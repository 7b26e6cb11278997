// --where, which says what a launcher has told a process, and the file in which torchrun looks for
// why one has failed.
#include <nlohmann/json.hpp>

#include <fstream>

#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

const std::map<std::string, std::string> kSrun = {
    {"SLURM_JOB_ID", "4711"},       {"SLURM_STEP_ID", "0"},
    {"SLURM_PROCID", "1"},          {"SLURM_LOCALID", "1"},
    {"SLURM_NODEID", "0"},          {"SLURM_STEP_NODELIST", "localhost,n[08-09]"},
    {"SLURM_STEP_NUM_TASKS", "4"},  {"SLURM_STEP_TASKS_PER_NODE", "2,1(x2)"},
    {"CUDA_VISIBLE_DEVICES", "1,3"}};

}  // namespace

TEST_CASE("--where says launcher, rank, hosts, store and interface, and starts nothing") {
  const TemporaryFolder folder;
  const Outcome outcome = run_command("tessera-train --where", folder.path().string(), kSrun);
  INFO(outcome.out << outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  CHECK_THAT(outcome.out, Contains("variable   SLURM_STEP_NODELIST=localhost,n[08-09]\n") &&
                              Contains("variable   CUDA_VISIBLE_DEVICES=1,3\n") &&
                              Contains("launcher   Slurm\n") &&
                              Contains("rank       1 of 4, on this host 1 of 2\n") &&
                              Contains("localhost, n08, n09\n") &&
                              Contains("store      localhost port 62151 or one of the next 16, run "
                                       "id 4711.0, restart 0\n") &&
                              Contains("interface  lo, ") && Contains("\ngpu ") &&
                              Contains("\nnccl "));
  CHECK_THAT(outcome.out, !Contains("warning"));
}

TEST_CASE("--where says what is not read, and no port beyond the last") {
  const TemporaryFolder folder;
  const auto shown = [&](std::map<std::string, std::string> variables) {
    return run_command("tessera-train --where", folder.path().string(), variables).out;
  };
  auto both = kSrun;
  both["MASTER_ADDR"] = "n9";
  both["MASTER_PORT"] = "29500";
  CHECK_THAT(shown(both),
             Contains("ignored    MASTER_ADDR=n9: rank 0 is at host localhost of "
                      "SLURM_STEP_NODELIST\n") &&
                 Contains("ignored    MASTER_PORT=29500: rank 0 is at host localhost"));
  const std::map<std::string, std::string> own = {{"TESSERA_RANK", "0"},
                                                  {"TESSERA_WORLD_SIZE", "2"},
                                                  {"TESSERA_STORE", "localhost:65535"},
                                                  {"MASTER_ADDR", "n9"}};
  CHECK_THAT(shown(own),
             Contains("ignored    MASTER_ADDR=n9: rank 0 is at TESSERA_STORE=localhost:65535\n") &&
                 Contains("store      localhost port 65535, run id none"));
  CHECK_THAT(shown({{"RANK", "0"},
                    {"WORLD_SIZE", "2"},
                    {"LOCAL_RANK", "0"},
                    {"MASTER_ADDR", "localhost"},
                    {"MASTER_PORT", "65530"}}),
             Contains("port 65530 or one of the next 5, run id none") && !Contains("ignored"));
}

TEST_CASE("--where warns of a GPU's one queue") {
  const TemporaryFolder folder;
  const Outcome outcome = run_command("tessera-train --where", folder.path().string(),
                                      {{"CUDA_DEVICE_MAX_CONNECTIONS", "1"}});
  CHECK(outcome.exit_code == 0);
  CHECK_THAT(outcome.out,
             Contains("warning    CUDA_DEVICE_MAX_CONNECTIONS=1") && Contains("launcher   none\n"));
}

TEST_CASE("--where shows wrong variables, and says what is wrong with them") {
  const TemporaryFolder folder;
  const Outcome outcome =
      run_command("tessera-train --where", folder.path().string(), {{"RANK", "3"}});
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.out, Contains("variable   RANK=3\n") && Contains("\nnccl "));
  CHECK_THAT(outcome.err, Contains("RANK=3 is set but not WORLD_SIZE"));
}

TEST_CASE("a run that fails writes its line to torchrun's file, and one that is well does not") {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "error.json").string();
  const std::map<std::string, std::string> variables = {{"TORCHELASTIC_ERROR_FILE", file}};
  CHECK(run_command("tessera-train --version", folder.path().string(), variables).exit_code == 0);
  CHECK_FALSE(std::filesystem::exists(file));
  const Outcome outcome =
      run_command("tessera-train --data.path=no-book.txt", folder.path().string(), variables);
  CHECK(outcome.exit_code == 2);
  std::ifstream stream(file);
  REQUIRE(stream);
  const auto json = nlohmann::json::parse(stream);
  const std::string told = json["message"]["extraInfo"]["py_callstack"];
  CHECK(outcome.err == "tessera-train: " + told + "\n");
  CHECK(json["message"]["message"] == told);
  CHECK(std::stoll(json["message"]["extraInfo"]["timestamp"].get<std::string>()) > 1'000'000'000);
  const Outcome unwritten =
      run_command("tessera-train --data.path=no-book.txt", folder.path().string(),
                  {{"TORCHELASTIC_ERROR_FILE", "/no/such/folder/file"}});
  CHECK(unwritten.exit_code == 2);
  CHECK_THAT(unwritten.err, Contains("no-book.txt") && Contains("TORCHELASTIC_ERROR_FILE"));
}
