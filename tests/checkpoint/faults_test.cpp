// A save in which one call of the system fails, or at which the process is killed.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <mutex>

#include "tessera/base/log.hpp"
#include "tests/checkpoint/saved_steps.hpp"
#include "tests/checkpoint/system_calls.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
namespace fs = std::filesystem;

namespace {

// What a save says on one rank.
struct SaveOutcome {
  std::string type{}, text{};
  int rank = -1;
  bool operator==(const SaveOutcome&) const = default;
};

template <class F>
SaveOutcome outcome_of(const F& f) {
  try {
    f();
  } catch (const DataError& error) {
    return {"DataError", error.what(), error.rank()};
  } catch (const DeviceError& error) {
    return {"DeviceError", error.what(), error.rank()};
  } catch (const std::exception& error) {
    return {"another error", error.what(), -1};
  }
  return {};
}

std::array<SaveOutcome, kSavers> save_together(const std::string& folder, std::int64_t step,
                                               SaveWay way = SaveWay::now) {
  std::array<SaveOutcome, kSavers> outcomes;
  run_local(kSavers, {.threads = 1}, [&](World& world) {
    CallWatch::set_rank(world.rank());
    outcomes[static_cast<std::size_t>(world.rank())] =
        outcome_of([&] { save_step(folder, step, world, way); });
  });
  return outcomes;
}

void save_unbroken(const std::string& folder, std::int64_t step) {
  const CallWatch watch(folder);
  for (const SaveOutcome& outcome : save_together(folder, step)) CHECK(outcome.text == "");
}

struct TriedFault {
  int error = 0;
  bool is_short = false, is_empty = false;
};

// Breaks every call of a save below `root` in turn. `folder` is empty, or has step 1.
void break_every_call(const std::string& root, const std::string& folder, bool has_older,
                      SaveWay way) {
  std::vector<std::vector<SystemCall>> calls;
  {
    const CallWatch watch(root);
    save_together(folder, 2, way);
    for (int rank = 0; rank < kSavers; ++rank) calls.push_back(watch.calls_of(rank));
  }
  const auto clear = [&] {
    if (has_older)
      fs::remove_all(fs::path(folder) / "step-2");
    else
      for (const auto& entry : fs::directory_iterator(root)) fs::remove_all(entry.path());
  };
  clear();
  GridShare share;
  for (int rank = 0; rank < kSavers; ++rank) {
    const auto& own = calls[static_cast<std::size_t>(rank)];
    CHECK(own.size() > 10);
    // Sums have told that all is there, and nobody reads headers.
    for (const SystemCall& call : own)
      CHECK_FALSE((call.kind == CallKind::open && call.path.ends_with(".safetensors")));
    for (std::size_t at = 1; at <= own.size(); ++at)
      for (const TriedFault& tried :
           {TriedFault{ENOSPC}, TriedFault{EIO}, TriedFault{0, true}, TriedFault{0, false, true}}) {
        const SystemCall& call = own[at - 1];
        if (tried.error == 0 && call.kind != CallKind::write) continue;
        if (!share.takes()) continue;
        std::array<SaveOutcome, kSavers> outcomes;
        {
          const CallWatch watch(root, {.rank = rank,
                                       .at = at,
                                       .error = tried.error,
                                       .is_short = tried.is_short,
                                       .is_empty = tried.is_empty});
          outcomes = save_together(folder, 2, way);
        }
        INFO("rank " << rank << ", call " << at << ", of kind " << static_cast<int>(call.kind)
                     << " at " << call.path << ", errno " << tried.error);
        INFO(outcomes[0].text);
        for (const SaveOutcome& outcome : outcomes) CHECK(outcome == outcomes[0]);
        const bool is_there = fs::exists(fs::path(folder) / "step-2");
        const bool is_begun = std::any_of(
            own.begin(), own.begin() + static_cast<std::ptrdiff_t>(at),
            [](const SystemCall& c) { return c.path.find("/.unfinished-") != std::string::npos; });
        // What others have left stays where the folder cannot be looked through for it.
        const bool is_sweep = call.kind == CallKind::open && call.path == folder && !is_begun;
        if (tried.is_short || call.kind == CallKind::close || is_sweep) {
          CHECK(outcomes[0].text == "");
          CHECK(is_there);
        } else {
          CHECK((outcomes[0].type == "DataError" || outcomes[0].type == "DeviceError"));
          CHECK(outcomes[0].rank == rank);
          CHECK(outcomes[0].text.find(root) != std::string::npos);
          CHECK(outcomes[0].text.find("unfinished") == std::string::npos);
          CHECK_FALSE((call.kind == CallKind::write &&
                       outcomes[0].text.find("saving step 2 has failed: '") == std::string::npos));
          // It has its name already when the folder around it is not written to the disk.
          CHECK(is_there == (is_begun && call.path == folder));
        }
        CHECK(complaint(folder) == "");
        if (has_older) CHECK(complaint(folder, 1) == "");
        if (fs::exists(folder)) CHECK(hidden_in(folder).empty());
        clear();
      }
  }
}

}  // namespace

TEST_CASE("a save of which one call fails is one error on all ranks, and leaves nothing behind") {
  const TemporaryFolder root;
  const SaveWay way = GENERATE(SaveWay::now, SaveWay::later);
  SECTION("beside an older one") {
    save_unbroken(root.path().string(), 1);
    break_every_call(root.path().string(), root.path().string(), true, way);
  }
  SECTION("in a folder that it makes") {
    break_every_call(root.path().string(), root / "a/b", false, way);
  }
}

TEST_CASE("a save that a disk has no room for says what it needs and what is free") {
  const TemporaryFolder root;
  const std::string folder = root.path().string();
  const auto save = [&](std::int64_t step, std::int64_t numel) {
    SaveOutcome outcome;
    run_local(1, {}, [&](World& world) {
      CallWatch::set_rank(0);
      const Tensor one = Tensor::zeros({1}, f32, world.device());  // all elements lie in it
      const StateDict state{{"a", one.view({numel}, {0}, 0)}};
      const std::vector<checkpoint::Part> parts{checkpoint::part("model", state, world)};
      outcome = outcome_of([&] { checkpoint::save(folder, step, parts, {}, world); });
    });
    return outcome;
  };
  // The first write fails, as on a disk that is full.
  CallFault full{.rank = 0, .error = ENOSPC};
  {
    const CallWatch watch(folder);
    save(1, 1);
    const auto calls = watch.calls_of(0);
    full.at = 1 + static_cast<std::size_t>(
                      std::ranges::find(calls, CallKind::write, &SystemCall::kind) - calls.begin());
  }
  const auto numel = static_cast<std::int64_t>(fs::space(folder).available / 2 + (1 << 20));
  const CallWatch watch(folder, full);
  const SaveOutcome outcome = save(7, numel);
  INFO(outcome.text);
  CHECK(outcome.type == "DeviceError");
  const std::string step = folder + "/step-7";
  CHECK(outcome.text.starts_with("checkpoint::save: saving step 7 has failed: '" + step +
                                 "/model/shard-00001-model-00001-of-00001.safetensors' could not "
                                 "be written: No space left on device; '" +
                                 step + "' needs " + std::to_string(4 * numel) +
                                 " bytes, and its disk has "));
  CHECK(outcome.text.ends_with(" free; name another folder"));
  CHECK(hidden_in(folder).empty());
}

TEST_CASE("a slow disk is no timeout while its bytes grow, and after 10 s its rank is named") {
  const SaveWay way = GENERATE(SaveWay::now, SaveWay::later);
  const bool is_whole = GridShare::stride() == 1;
  // Four writes a rank, which together take longer than ranks wait for each other. The slowest rank
  // is named by the first poll that begins after 10 s, if it has not written all by its end.
  const int slow_ms = is_whole ? 5000 : 500;
  const std::int64_t rows = 10;
  const TemporaryFolder root;
  const std::string folder = root.path().string();
  std::mutex mutex;
  std::string lines;
  set_log_sink([&](LogLevel, const std::string& line) {
    const std::lock_guard lock(mutex);
    lines += line + '\n';
  });
  std::array<SaveOutcome, kSavers> outcomes;
  {
    const CallWatch watch(folder, {.rank = 1, .slow_ms = slow_ms});
    run_local(kSavers, {.threads = 1, .timeout_seconds = slow_ms * 2.5e-3}, [&](World& world) {
      CallWatch::set_rank(world.rank());
      const StateDict state{{"a", Tensor::full({rows, 1 << 20}, 1, f32, world.device())}};
      const std::vector<checkpoint::Part> parts{checkpoint::part("model", state, world)};
      outcomes[static_cast<std::size_t>(world.rank())] = outcome_of([&] {
        if (way == SaveWay::now) return checkpoint::save(folder, 1, parts, {}, world);
        checkpoint::Saver saver(folder, world);
        saver.save(1, parts, {});
        saver.wait();
      });
    });
  }
  set_log_sink({});
  INFO(lines);
  for (const SaveOutcome& outcome : outcomes) CHECK(outcome.text == "");
  CHECK(checkpoint::steps_in(folder) == std::vector<std::int64_t>{1});
  const bool is_named = lines.find(" s; rank 1 is the slowest, with ") != std::string::npos;
  CHECK(is_named == is_whole);
}

TEST_CASE("a rank that has no thread left to write with says so") {
  const TemporaryFolder root;
  const std::string folder = root / "runs", kept = root / "kept";
  const int rank = GENERATE(0, 2);
  fs::create_directory(folder);
  const CallWatch watch(folder, {.rank = rank, .thread_error = EAGAIN});
  std::array<std::string, kSavers> said;
  run_local(kSavers, {.threads = 1}, [&](World& world) {
    save_step(kept, 1, world);  // starts the threads that a rank has anyway
    CallWatch::set_rank(world.rank());
    try {
      save_step(folder, 1, world);
    } catch (const DeviceError& error) {
      CHECK(error.rank() == rank);
      said[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  for (const std::string& text : said)
    CHECK(text ==
          "checkpoint: the thread that writes for this rank could not be started: Resource "
          "temporarily unavailable; use fewer ranks, or raise the limit (ulimit -u, -v)");
  CHECK(checkpoint::steps_in(folder).empty());
  CHECK(hidden_in(folder).empty());
}

TEST_CASE("a folder on a slow disk is tried, and saved into, without a timeout") {
  // Each fsync takes longer than ranks wait for each other, and all of a commit longer than the 10
  // s for which a disk may stand still.
  const int slow_ms = GridShare::stride() == 1 ? 3000 : 400;
  const TemporaryFolder root;
  const std::string folder = root / "a/b";
  const CallWatch watch(root.path().string(), {.rank = 0, .slow_sync_ms = slow_ms});
  std::array<std::string, kSavers> said;
  run_local(kSavers, {.threads = 1, .timeout_seconds = slow_ms * 0.75e-3}, [&](World& world) {
    CallWatch::set_rank(world.rank());
    said[static_cast<std::size_t>(world.rank())] = outcome_of([&] {
                                                     checkpoint::check_folder(folder, 0, world);
                                                     save_step(folder, 1, world);
                                                   }).text;
  });
  for (const std::string& text : said) CHECK(text == "");
  CHECK(complaint(folder, 1) == "");
}

TEST_CASE("a save that is killed at any call leaves the older checkpoint or the new one") {
  const TemporaryFolder root;
  const std::string folder = root / "runs", kept = root / "kept";
  fs::create_directory(kept);
  save_unbroken(kept, 1);
  // What others have left is swept, so that programs are killed there, too.
  for (const char* const left : {".unfinished-step-2-0", ".removed-step-0-0"}) {
    fs::create_directories(fs::path(kept) / left / "model");
    root.write(concat("kept/", left, "/model/shard"), "some");
  }
  GridShare share;
  int killed = 0;
  bool was_old = false, was_new = false;
  const SaveWay way = GENERATE(SaveWay::now, SaveWay::later);
  for (int rank = 0; rank < kSavers; ++rank) {
    for (std::size_t at = 1;; ++at) {
      if (!share.takes()) continue;
      fs::copy(kept, folder, fs::copy_options::recursive);
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        const CallWatch watch(folder, {.rank = rank, .at = at, .signal = SIGKILL});
        bool is_saved = save_together(folder, 2, way)[0].text.empty();
        CallWatch::set_rank(0);
        is_saved = outcome_of([&] { checkpoint::keep_newest(folder, 1); }).text.empty() && is_saved;
        ::raise(is_saved ? SIGUSR1 : SIGUSR2);
      }
      int status = 0;
      REQUIRE(::waitpid(child, &status, 0) == child);
      INFO("rank " << rank << ", call " << at << ", status " << status);
      REQUIRE(WIFSIGNALED(status));
      const bool is_whole = WTERMSIG(status) == SIGUSR1;
      if (!is_whole) CHECK(WTERMSIG(status) == SIGKILL);
      killed += is_whole ? 0 : 1;
      CHECK(complaint(folder) == "");
      const auto steps = checkpoint::steps_in(folder);
      REQUIRE(!steps.empty());
      was_old = was_old || steps.back() == 1;
      was_new = was_new || steps.back() == 2;
      save_unbroken(folder, 3);
      CHECK(complaint(folder, 3) == "");
      CHECK(checkpoint::steps_in(folder).size() == steps.size() + 1);
      CHECK(hidden_in(folder).empty());
      fs::remove_all(folder);
      if (is_whole) break;
    }
  }
  CHECK(killed > (GridShare::stride() > 2 ? 5 : 30));
  CHECK(was_old);
  CHECK(was_new);
}
