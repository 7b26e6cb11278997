// Ranks under mpirun of which one is killed at a call of the system in a save: the run goes on from
// what is whole, on other ranks.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <future>
#include <limits>
#include <map>
#include <mutex>
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

constexpr int kRanks = 4;

// Of the same run: saves at step 2 and, at its end, at step 3, and keeps one.
std::string run_of(const std::string& options) {
  return kTiny + "--checkpoint.enable=true --checkpoint.interval=2 --checkpoint.keep_latest_k=1 " +
         options + ' ';
}

bool has_step(const TemporaryFolder& folder, int step) {
  return std::filesystem::exists(folder.path() / "checkpoint" / ("step-" + std::to_string(step)) /
                                 "manifest.json");
}

// What makes a call of the system below the run's checkpoints a signal to its program.
std::string kill_plan(int signal, int rank, int call, const TemporaryFolder& folder) {
  return std::to_string(signal) + ' ' + std::to_string(rank) + ' ' + std::to_string(call) + ' ' +
         (folder / "checkpoint");
}

}  // namespace

TEST_CASE("a run that is stopped while it tries its folder of checkpoints leaves nothing there") {
  int stopped = 0;
  for (int call = 1; call <= 20; ++call) {  // of about 14, behind which it trains nothing
    const BookFolder folder;
    const Outcome run = run_command(
        run_of("--training.steps=0 --ranks 2 --checkpoint.folder=" + (folder / "checkpoint")),
        folder.path().string(),
        {{"LD_PRELOAD", TESSERA_KILLED_PROGRAM}, {"KILL_AT", kill_plan(SIGTERM, 0, call, folder)}});
    INFO("call " << call << '\n' << run.out << run.err);
    CHECK((run.exit_code == 0 || run.exit_code == 128 + SIGTERM));
    stopped += run.exit_code == 0 ? 0 : 1;
    const std::filesystem::path in = folder.path() / "checkpoint";
    CHECK((!std::filesystem::exists(in) || std::filesystem::is_empty(in)));
  }
  CHECK(stopped > 5);
}

TEST_CASE("ranks of which one is killed at any call of a save go on, on other ranks") {
  if (!std::filesystem::exists(TESSERA_MPIRUN)) {
    WARN("skipped: mpirun is not there");
    return;
  }
  // How the checkpoints are saved.
  const std::string way = GENERATE(as<std::string>{}, "", "--checkpoint.async_mode=async");
  const BookFolder kept;
  const Outcome begun = run_command(run_of(way + " --training.steps=1"), kept.path().string());
  REQUIRE(begun.exit_code == 0);
  REQUIRE(has_step(kept, 1));
  std::mutex checks;  // Catch's are not made for several threads
  // Whether nobody was killed, since there is no such call.
  const auto is_whole_at = [&](int rank, int call) {
    const TemporaryFolder folder;
    std::filesystem::copy(kept.path(), folder.path(), std::filesystem::copy_options::recursive);
    auto variables = kMpirun;
    variables["KILL_AT"] = kill_plan(SIGKILL, rank, call, folder);
    // Two mpirun that make it at the same time fail.
    std::filesystem::create_directory(folder / "sessions");
    variables["OMPI_MCA_orte_tmpdir_base"] = folder / "sessions";
    const std::string command =
        "mpirun -n " + std::to_string(kRanks) + " -x LD_PRELOAD=" TESSERA_KILLED_PROGRAM " " +
        run_of(way + " --training.steps=3 --checkpoint.folder=" + (folder / "checkpoint"));
    const Outcome run = run_command(command, folder.path().string(), variables);
    std::map<int, Outcome> verified;
    for (const int step : {1, 2, 3})
      if (has_step(folder, step))
        verified[step] =
            run_command("tessera-checkpoint verify checkpoint/step-" + std::to_string(step),
                        folder.path().string());
    const Outcome resumed =
        run_command(run_of("--training.steps=5 --ranks 2"), folder.path().string());

    const std::lock_guard lock(checks);
    INFO("rank " << rank << ", call " << call << '\n' << run.out << run.err);
    // What is told is there, or what was saved behind it.
    const int told = has(run.out, "checkpoint: step 3 is in")   ? 3
                     : has(run.out, "checkpoint: step 2 is in") ? 2
                                                                : 1;
    for (const auto& [step, outcome] : verified) {
      INFO(outcome.out << outcome.err);
      CHECK(outcome.exit_code == 0);
    }
    const int newest = verified.empty() ? 0 : verified.rbegin()->first;
    CHECK(newest >= told);
    INFO(resumed.out << resumed.err);
    CHECK(resumed.exit_code == 0);
    CHECK(has(resumed.out, "goes on after step " + std::to_string(newest) + " of"));
    CHECK(has_step(folder, 5));
    // Beside it stays what it was loaded from, and nothing that was left.
    for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "checkpoint")) {
      const std::string name = entry.path().filename().string();
      CHECK((name == "step-5" || name == "step-" + std::to_string(newest)));
    }
    CHECK(whole_lines(folder) == 5);
    return run.exit_code == 0;
  };
  // Runs under mpirun sleep more than they compute, so several are tried side by side.
  struct Calls {
    int next = 1;
    bool are_over = false;
    GridShare share{};
  };
  std::vector<Calls> calls(kRanks);  // of each rank
  std::mutex next;                   // of these
  const auto try_calls = [&] {
    for (int killed = 0;;) {
      int rank = 0, call = 0;
      {
        const std::lock_guard lock(next);
        const auto behind = std::ranges::min_element(calls, {}, [](const Calls& of) {
          return of.are_over ? std::numeric_limits<int>::max() : of.next;
        });
        if (behind->are_over) return killed;
        while (!behind->share.takes()) ++behind->next;
        rank = static_cast<int>(behind - calls.begin());
        call = behind->next++;
      }
      const bool is_whole = is_whole_at(rank, call);
      const std::lock_guard lock(next);
      if (is_whole)
        calls[static_cast<std::size_t>(rank)].are_over = true;
      else
        ++killed;
    }
  };
  std::vector<std::future<int>> tries;
  for (int i = 0; i < kRanks; ++i) tries.push_back(std::async(std::launch::async, try_calls));
  int killed = 0;
  for (std::future<int>& each : tries) killed += each.get();
  CHECK(killed > 0);
  if (GridShare::stride() == 1) CHECK(killed > 250);
}
