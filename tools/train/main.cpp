// tessera-train: reads what it is told, and turns every outcome into an exit code and at most one
// line on stderr.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "build_info.hpp"
#include "runtime/device/cpu_check.hpp"
#include "runtime/run/error_file.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/comm/lost_rank.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/run/environment.hpp"
#include "tessera/run/race_check.hpp"
#include "tessera/run/run.hpp"
#include "tessera/version.hpp"
#include "tools/train/config.hpp"
#include "tools/train/metrics.hpp"
#include "tools/train/signals.hpp"
#include "tools/train/train.hpp"
#include "tools/train/where.hpp"

namespace {

using namespace tessera;

void report(const std::string& message) {
  std::fprintf(stderr, "tessera-train: %s\n", printable(message).c_str());
}

// Who knows why a run failed: this process, all that were to come together, another rank, which
// says the same, or a peer that failed before it and says so itself. A rank that is lost or late
// says nothing.
enum class Cause { own, joining, of_rank, of_peer, lost_rank };

// Whether a user who sees what this process says sees what rank 0 says, too. The agents of torchrun
// are started on each machine, and pods have logs of their own.
bool is_seen_with_rank_0(const LaunchEnvironment& environment) {
  const Launcher launcher = environment.launcher;
  const bool is_one_command = launcher == Launcher::open_mpi || launcher == Launcher::pmi ||
                              launcher == Launcher::pmix || launcher == Launcher::slurm;
  return environment.rank != 0 && (is_one_command || environment.local_rank != 0);
}

// A launcher ends the rest of a job when one process fails (Open MPI's mpirun takes a second to do
// so). The process that can best say why speaks and ends first: the first rank if it has a cause of
// its own, then others with a cause, then those that only heard of a failure. That is one line a
// job, and none is lost where the first rank is well. When a rank is lost, the launcher is ending
// the others already or can't see it: each of them says what it knows at once, see linger. Ranks
// that have not come together have waited long enough, and rank 0 has heard with the others.
void wait_for_turn(const LaunchEnvironment& environment, Cause cause) {
  if (!environment.several_processes() || cause == Cause::lost_rank) return;
  constexpr std::chrono::milliseconds kTurn{2000}, kShortTurn{500};
  const int turn = (cause == Cause::of_peer ? 2 : 0) + (environment.rank > 0 ? 1 : 0);
  const bool is_short = cause == Cause::joining || cause == Cause::of_rank;
  std::this_thread::sleep_for((is_short ? kShortTurn : kTurn) * turn);
}

// The launcher sends SIGTERM anew at every exit that it sees, and SIGKILL a second after the first:
// who has named a lost rank stays for as long as others need to name it too.
void linger() { std::this_thread::sleep_for(std::chrono::milliseconds(300)); }

void print(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0)
    throw DeviceError("writing to stdout failed");
}

std::string version_text() {
#if defined(__clang__)
  const std::string compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  const std::string compiler = "gcc " __VERSION__;
#else
  const std::string compiler = "an unknown compiler";
#endif
  const std::string features = tools::kFeatures;
  return concat("tessera-train ", TESSERA_VERSION, "\ncommit ", tools::kCommit, "\ncompiler ",
                compiler, "\nfeatures ", features.empty() ? "none" : features, "\n");
}

// --help, --version and --print-config answer once a job.
void answer(const train::Config& config, const LaunchEnvironment& environment) {
  if (environment.rank != 0) return;
  const train::Config::Flags& flags = config.flags;
  print(flags.help      ? train::help_text(flags.help_of)
        : flags.version ? version_text()
                        : train::print_config(config));
}

int run(const std::vector<std::string>& arguments, LaunchEnvironment& environment) {
  std::exception_ptr broken;  // kept until --help has had its chance
  try {
    environment = detect(std::getenv);
  } catch (const DataError&) {
    broken = std::current_exception();
  }
  const train::Config config = train::parse_arguments(arguments);
  if (config.flags.help || config.flags.version) {
    answer(config, environment);
    return 0;
  }
  if (config.flags.where) print(train::where_text(broken));
  if (broken) std::rethrow_exception(broken);
  if (config.flags.where) return 0;
  std::optional<int> ranks;
  if (config.flags.ranks) ranks = static_cast<int>(*config.flags.ranks);
  train::validate(config, config.world_size(job_size(environment, ranks)));
  if (config.flags.print_config) {
    answer(config, environment);
    return 0;
  }
  if (!environment.notice.empty()) report("notice: " + environment.notice);
  train::restore_signal_handlers();  // a shell may have started this with SIGINT ignored
  train::hold_record_signal();
  const auto checker = race_checker_from(std::getenv);
  const int code = train::train(config, environment, checker);
  if (config.flags.dry_run) return code;
  return close_check(checker.get(), environment.rank, code, report, [](const std::string& summary) {
    train::Console(train::Terminal::detect(), 0, 1, 0).line(summary);
  });
}

std::string g_last_error;  // of the log: a run may end with 1 and throw nothing
std::atomic<bool> g_lacks_memory{false};
const std::terminate_handler g_mistake = std::get_terminate();

[[noreturn]] void note_lack_of_memory() {
  g_lacks_memory = true;
  throw std::bad_alloc();
}

// For std::terminate: where memory runs out in what must not fail, a destructor or an observer,
// nothing can be ended in order. Speaks once, without memory. All else is a mistake of ours.
void end_without_memory() {
  static std::atomic_flag has_spoken;
  if (!g_lacks_memory) g_mistake();
  while (has_spoken.test_and_set()) ::pause();  // another thread's turn, which ends the process
  constexpr std::string_view kLine =
      "tessera-train: out of memory; use a smaller model, batch or sequence\n";
  if (::write(STDERR_FILENO, kLine.data(), kLine.size()) < 0) errno = 0;  // nobody listens
  ::_exit(1);
}

// What a shell may have taken away, and the signals whose cause is reported where it is met.
void prepare_process() {
  // Else the next file that is opened would be taken for a closed stream. Writing to this one
  // fails.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

Cause cause_of(const Error& error, const LaunchEnvironment& environment) {
  const bool is_joining = dynamic_cast<const JoinError*>(&error) != nullptr;
  if ((is_joining || dynamic_cast<const DataError*>(&error)) && error.rank() >= 0 &&
      error.rank() != environment.rank)
    return Cause::of_rank;
  return is_joining                               ? Cause::joining
         : dynamic_cast<const LostRank*>(&error)  ? Cause::lost_rank
         : dynamic_cast<const CommError*>(&error) ? Cause::of_peer
                                                  : Cause::own;
}

// Whether the message is to begin with the rank: rank 0 of one process speaks for all, and who
// could not join has named itself.
bool names_rank(const Error& error, const LaunchEnvironment& environment) {
  if (dynamic_cast<const JoinError*>(&error)) return false;
  return error.rank() > 0 || (error.rank() == 0 && environment.several_processes() &&
                              dynamic_cast<const DataError*>(&error) == nullptr);
}

// The exit code of the exception that is being handled, with its message.
int explain(const LaunchEnvironment& environment, std::string& message, Cause& cause) {
  try {
    throw;
  } catch (const Error& error) {
    message = names_rank(error, environment) ? concat("rank ", error.rank(), ": ", error.what())
                                             : error.what();
    // The table that follows in a message about memory is --dry-run's.
    if (dynamic_cast<const OutOfMemory*>(&error)) message = message.substr(0, message.find('\n'));
    cause = cause_of(error, environment);
  } catch (const std::system_error& error) {
    message = concat("the system refused: ", error.what(),
                     "; use fewer --ranks or --threads, or raise the limit");
  } catch (const std::bad_alloc&) {
    message = "out of memory; use a smaller model, batch or sequence";
  } catch (const std::exception& error) {
    message = error.what();
  }
  return exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  // First of all, in an object that any processor of this architecture can run.
  if (const std::string missing = missing_cpu_feature(kernel_arch()); !missing.empty()) {
    report(concat("this processor lacks ", missing, ", which the kernels of this build need (",
                  kernel_arch(), "); configure with -Dkernel_arch= and build again"));
    return 1;
  }
  prepare_process();
  std::set_new_handler(note_lack_of_memory);
  std::set_terminate(end_without_memory);
  LaunchEnvironment environment;
  try {
    set_log_sink([](LogLevel level, const std::string& message) {
      if (level == LogLevel::error) g_last_error = message;
      report(message);
    });
    const int code = run(std::vector<std::string>(argv + 1, argv + argc), environment);
    if (code == 1) write_error_file(std::getenv, g_last_error);
    return code;
  } catch (...) {
    train::restore_signal_handlers();
    std::string message;
    Cause cause = Cause::own;
    const int code = explain(environment, message, cause);
    if (cause == Cause::lost_rank) std::signal(SIGTERM, SIG_IGN);
    // Before the turn: torchrun takes the earliest for the root cause.
    write_error_file(std::getenv, message);
    wait_for_turn(environment, cause);
    if (cause != Cause::of_rank || !is_seen_with_rank_0(environment)) report(message);
    if (cause == Cause::lost_rank) linger();
    return code;
  }
}
