#include "tessera/run/environment.hpp"

#include <charconv>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

// One launcher's variables. `marker` of them, from the first on, are what only this launcher sets:
// one of these without the rest means a broken start, where MASTER_ADDR alone means nothing.
struct VariableSet {
  Launcher launcher;
  std::vector<const char*> required;
  std::size_t markers;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_size;
};

const std::vector<VariableSet>& sets() {
  static const std::vector<VariableSet> all = {
      {Launcher::torchrun,
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"},
       3,
       "RANK",
       "WORLD_SIZE",
       "LOCAL_RANK",
       "LOCAL_WORLD_SIZE"},
      {Launcher::open_mpi,
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"},
       4,
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_SIZE",
       "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {Launcher::pmi,
       {"PMI_RANK", "PMI_SIZE"},
       2,
       "PMI_RANK",
       "PMI_SIZE",
       "MPI_LOCALRANKID",
       "MPI_LOCALNRANKS"},
      {Launcher::slurm,
       {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
       0,
       "SLURM_PROCID",
       "SLURM_STEP_NUM_TASKS",
       "SLURM_LOCALID",
       nullptr},
      {Launcher::pmix, {"PMIX_RANK", "PMIX_NAMESPACE"}, 0, "PMIX_RANK", nullptr, nullptr, nullptr},
  };
  return all;
}

// An empty variable counts as absent: `RANK= program` is how a shell user takes one away.
const char* find(const EnvironmentLookup& lookup, const char* variable) {
  const char* value = variable ? lookup(variable) : nullptr;
  return value && *value ? value : nullptr;
}

int integer(const char* variable, const char* text) {
  int value = 0;
  const std::string_view view(text);
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  if (error != std::errc() || end != view.data() + view.size() || value < 0) {
    throw DataError(concat(variable, "='", text,
                           "' is not a non-negative 32-bit integer; correct it or unset it"));
  }
  return value;
}

// The value of a variable that a launcher may leave out.
int integer_or(const EnvironmentLookup& lookup, const char* variable, int otherwise) {
  const char* text = find(lookup, variable);
  return text ? integer(variable, text) : otherwise;
}

void expect_below(const char* small_name, int small, const char* large_name, int large) {
  if (small >= large) {
    throw DataError(concat(small_name, "=", small, " is not below ", large_name, "=", large,
                           "; ranks count from 0"));
  }
}

LaunchEnvironment read(const VariableSet& set, const EnvironmentLookup& lookup) {
  LaunchEnvironment found;
  found.launcher = set.launcher;
  found.rank = integer(set.rank, lookup(set.rank));
  found.world_size = integer_or(lookup, set.world_size, 0);
  if (set.world_size) expect_below(set.rank, found.rank, set.world_size, found.world_size);
  const bool alone = found.world_size == 1;
  found.local_size = integer_or(lookup, set.local_size, alone ? 1 : 0);
  found.local_rank = integer_or(lookup, set.local_rank, 0);
  if (found.local_size > 0 && find(lookup, set.local_rank)) {
    expect_below(set.local_rank, found.local_rank, set.local_size ? set.local_size : set.world_size,
                 found.local_size);
  }
  return found;
}

// A set of which something is there although no set is complete.
void refuse_incomplete(const VariableSet& set, const EnvironmentLookup& lookup) {
  const char* present = nullptr;
  std::string missing;
  for (std::size_t i = 0; i < set.required.size(); ++i) {
    if (!find(lookup, set.required[i])) {
      missing += concat(missing.empty() ? "" : ", ", set.required[i]);
    } else if (i < set.markers && !present) {
      present = set.required[i];
    }
  }
  if (!present) return;
  throw DataError(concat(present, "=", lookup(present), " is set but not ", missing,
                         ": this is not a whole ", name(set.launcher),
                         " environment; set what is missing, or unset ", present, " to run alone"));
}

}  // namespace

LaunchEnvironment detect(const EnvironmentLookup& lookup) {
  for (const VariableSet& set : sets()) {
    bool complete = true;
    for (const char* variable : set.required) complete = complete && find(lookup, variable);
    if (complete) return read(set, lookup);
  }
  for (const VariableSet& set : sets()) refuse_incomplete(set, lookup);

  LaunchEnvironment alone;
  for (const char* variable : {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NTASKS", "SLURM_PROCID"}) {
    if (!find(lookup, variable)) continue;
    alone.notice =
        concat(variable, "=", lookup(variable),
               " is a Slurm allocation without a step: running alone; start with srun or "
               "mpirun for several processes");
    break;
  }
  return alone;
}

int job_size(const LaunchEnvironment& environment, std::optional<int> ranks) {
  if (environment.launcher == Launcher::torchrun && environment.world_size > 1) {
    throw DataError(concat("torchrun started WORLD_SIZE=", environment.world_size,
                           " processes, but CPU processes meet through MPI here; use mpirun -n ",
                           environment.world_size, ", or --ranks ", environment.world_size,
                           " in one process"));
  }
  if (!ranks) return environment.world_size;
  if (environment.several_processes()) {
    throw DataError(concat("--ranks ", *ranks, " makes threads, but ", name(environment.launcher),
                           " started ",
                           environment.world_size > 0 ? concat(environment.world_size, " processes")
                                                      : std::string("this process"),
                           "; leave out --ranks or the launcher"));
  }
  return *ranks;
}

}  // namespace tessera
