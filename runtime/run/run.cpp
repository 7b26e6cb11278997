#include "tessera/run/run.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "runtime/run/error_file.hpp"
#include "runtime/run/process_seat.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/run/race_check.hpp"
#include "tessera/run/watchdog.hpp"

namespace tessera {
namespace {

void write_line(const std::string& program, const char* kind, const std::string& text) {
  std::fprintf(stderr, "%s: %s%s\n", program.c_str(), kind, text.c_str());
}

int parse_count(const char* flag, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > 4096)
    throw DataError(
        concat(flag, ": '", text, "' is no number from 1 to 4096; write for example ", flag, " 2"));
  return value;
}

const char* lookup(const char* name) { return std::getenv(name); }

// " (train.cpp:12)", the line of the program that an error of an operation names.
std::string line_of(const std::exception& error) {
  const auto* const contract = dynamic_cast<const ContractError*>(&error);
  if (!contract || !contract->is_at_caller()) return "";
  const std::string_view path = contract->where().file_name();
  return concat(" (", path.substr(path.rfind('/') + 1), ':', contract->where().line(), ')');
}

// MPI is what carries bytes between machines, where its launcher or one that knows it has started
// the ranks. srun knows it with --mpi=pmix alone; otherwise MPI_Init would end the process.
bool goes_by_mpi(const LaunchEnvironment& environment, const WorldOptions& options) {
  const Launcher launcher = environment.launcher;
  const bool is_mpirun = launcher == Launcher::open_mpi || launcher == Launcher::pmix;
  const bool knows_it =
      launcher == Launcher::pmi || (launcher == Launcher::slurm && lookup("PMIX_RANK"));
  const bool is_apart =
      knows_it && environment.local_size > 0 && environment.local_size < environment.world_size;
  return environment.world_size == 0 || options.transport == Transport::messages ||
         (World::has_mpi() && (is_mpirun || is_apart));
}

// A GPU for each process of the launcher.
World nccl_world(const LaunchEnvironment& environment, WorldOptions options) {
  if (environment.world_size == 0)
    throw DataError(concat("--device=cuda: ", name(environment.launcher),
                           " does not tell how many processes it started; use torchrun, srun or "
                           "mpirun"));
  if (environment.store_port == 0 && environment.local_size != environment.world_size)
    throw DataError(concat("--device=cuda: ", name(environment.launcher),
                           " gives no address at which ranks of several machines meet; use "
                           "torchrun or srun, or set TESSERA_RANK, TESSERA_WORLD_SIZE and "
                           "TESSERA_STORE=HOST:PORT in each process"));
  if (const char* file = lookup("TESSERA_NCCL"); file && options.nccl.library.empty())
    options.nccl.library = file;
  return World::nccl(process_seat(environment, lookup), options);
}

void run_in(World& world, const std::function<void(World&)>& body) {
  try {
    body(world);
  } catch (...) {
    world.end(describe_exception());
    throw;
  }
  world.end();
}

int close(const RunOptions& options, int rank, int code) {
  const auto line = [&options](const char* kind) {
    return [&options, kind](const std::string& text) { write_line(options.program, kind, text); };
  };
  return close_check(options.world.race_checker.get(), rank, code, line("error: "), line(""));
}

}  // namespace

void run_ranks(const LaunchEnvironment& environment, std::optional<int> ranks,
               const WorldOptions& options, const std::function<void(World&)>& body) {
  const int threads = job_size(environment, ranks);
  if (environment.several_processes()) {
    if (options.device.kind != DeviceKind::cpu) {
      World world = nccl_world(environment, options);
      return run_in(world, body);
    }
    if (!goes_by_mpi(environment, options)) {
      World world = World::processes(process_seat(environment, lookup), options);
      return run_in(world, body);
    }
    World world = World::mpi(options);
    if (environment.world_size > 1 && environment.world_size != world.size())
      throw CommError(concat("the launcher started ", environment.world_size,
                             " processes, MPI sees ", world.size(),
                             "; start them with the mpirun of the MPI that this build uses"));
    return run_in(world, body);
  }
  run_local(threads, options, body);
}

int exit_code(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DataError&) {
    return 2;
  } catch (...) {
    return 1;
  }
}

int run(const RunOptions& given, const std::function<void(World&)>& body) {
  RunOptions options = given;
  set_log_sink([program = options.program](LogLevel level, const std::string& message) {
    write_line(program,
               level == LogLevel::info      ? ""
               : level == LogLevel::warning ? "warning: "
                                            : "error: ",
               message);
  });
  int rank = 0;
  try {
    const LaunchEnvironment environment = detect(lookup);
    rank = environment.rank;
    if (!environment.notice.empty() && rank == 0)
      write_line(options.program, "", environment.notice);
    if (!options.world.race_checker) options.world.race_checker = race_checker_from(lookup);
    if (const char* module = lookup("TESSERA_CUDA_MODULE");
        module && options.world.device.module.empty())
      options.world.device.module = module;
    Watchdog watchdog(options.world.timeout_seconds, [] { return 1; });
    if (environment.ends_with_parent) watchdog.end_with_parent();
    run_ranks(environment, options.ranks, options.world, body);
    return close(options, rank, 0);
  } catch (const std::exception& error) {
    const int code = exit_code();
    write_error_file(lookup, error.what());
    if (code == 2) {
      if (rank == 0) write_line(options.program, "error: ", error.what());
      return code;
    }
    const auto* const ours = dynamic_cast<const Error*>(&error);
    const bool names_rank =
        ours && ours->rank() >= 0 && !dynamic_cast<const JoinError*>(&error);  // it does itself
    const std::string who = names_rank ? concat("rank ", ours->rank(), ": ") : "";
    write_line(options.program, "error: ", concat(who, error.what(), line_of(error)));
    return close(options, rank, code);
  } catch (...) {
    write_error_file(lookup, describe_exception());
    write_line(options.program, "error: ", describe_exception());
    return close(options, rank, exit_code());
  }
}

DeviceChoice parse_device(std::string_view name) {
  if (name == "cpu") return {};
  DeviceChoice choice{.kind = DeviceKind::cuda};
  if (name == "cuda") return choice;
  constexpr std::string_view kPrefix = "cuda:";
  const char* const last = name.data() + name.size();
  const char* const first = name.starts_with(kPrefix) ? name.data() + kPrefix.size() : last;
  int index = 0;
  const auto [end, error] = std::from_chars(first, last, index);
  if (error == std::errc() && end == last && index >= 0) {
    choice.index = index;
    return choice;
  }
  throw DataError(concat("--device=", shortened(name),
                         ": is neither cpu, cuda nor cuda:N; write for example --device=cuda:1"));
}

int run(int argc, char** argv, const std::function<void(World&)>& body) {
  RunOptions options;
  if (argc > 0)
    options.program = std::string(argv[0]).substr(std::string_view(argv[0]).rfind('/') + 1);
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      for (const char* flag : {"--ranks", "--threads", "--device"}) {
        const std::string_view name = flag;
        if (!argument.starts_with(name)) continue;
        std::string_view value;
        if (argument == name && i + 1 < argc)
          value = argv[i + 1];
        else if (argument.size() > name.size() && argument[name.size()] == '=')
          value = argument.substr(name.size() + 1);
        else if (argument != name)
          continue;
        if (name == "--ranks")
          options.ranks = parse_count(flag, value);
        else if (name == "--device")
          options.world.device = parse_device(value);
        else
          options.world.threads = parse_count(flag, value);
      }
    }
  } catch (const DataError& error) {
    write_line(options.program, "error: ", error.what());
    return 2;
  }
  return run(options, body);
}

}  // namespace tessera
