#include "tessera/run/environment.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <vector>

#include "runtime/run/host_list.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/utf8.hpp"

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
      {Launcher::tessera,
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_STORE"},
       3,
       "TESSERA_RANK",
       "TESSERA_WORLD_SIZE",
       "TESSERA_LOCAL_RANK",
       "TESSERA_LOCAL_SIZE"},
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
      {Launcher::pmix, {"PMIX_RANK", "PMIX_NAMESPACE"}, 1, "PMIX_RANK", nullptr, nullptr, nullptr},
      {Launcher::kubernetes,
       {"JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR"},
       0,
       "JOB_COMPLETION_INDEX",
       "WORLD_SIZE",
       nullptr,
       nullptr},
  };
  return all;
}

// An empty variable counts as absent: `RANK= program` is how a shell user takes one away.
const char* find(const EnvironmentLookup& lookup, const char* variable) {
  const char* value = variable ? lookup(variable) : nullptr;
  return value && *value ? value : nullptr;
}

std::optional<int> parse(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

int integer(const char* variable, const char* text) {
  if (const auto value = parse(text)) return *value;
  throw DataError(concat(variable, "='", text,
                         "' is not a non-negative 32-bit integer; correct it or unset it"));
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

std::string text_or(const EnvironmentLookup& lookup, const char* variable, const char* otherwise) {
  const char* text = find(lookup, variable);
  return text ? text : otherwise;
}

std::optional<int> parse_port(std::string_view text) {
  const auto value = parse(text);
  return value && *value >= 1 && *value <= 65535 ? value : std::nullopt;
}

// "[::1]" is how an address of IPv6 is written where a port may follow.
std::string_view without_brackets(std::string_view host) {
  const bool is_bracketed = host.starts_with('[') && host.ends_with(']');
  return is_bracketed ? host.substr(1, host.size() - 2) : host;
}

void read_master_address(const EnvironmentLookup& lookup, LaunchEnvironment& found) {
  const std::string_view text = lookup("MASTER_ADDR");
  found.store_host = without_brackets(text);
  if (std::ranges::count(text, ':') == 1)  // an address of IPv6 has more of them
    throw DataError(concat("MASTER_ADDR='", text, "' has a port; write it into MASTER_PORT"));
  if (std::ranges::any_of(text, [](unsigned char c) { return c <= ' ' || c == 0x7f; }))
    throw DataError(concat("MASTER_ADDR='", shortened(text),
                           "' is no host: it has a space or a control character"));
  found.store_host_from = concat("MASTER_ADDR=", text);
}

void read_master_port(const char* text, LaunchEnvironment& found) {
  const auto port = parse_port(text);
  if (!port) throw DataError(concat("MASTER_PORT='", text, "' is no port; ports are 1 to 65535"));
  found.store_port = *port;
  found.store_port_from = concat("MASTER_PORT=", text);
}

// "node1:29500", "[fd00::1]:29500".
void read_store(const char* text, LaunchEnvironment& found) {
  const std::string_view all = text;
  const std::size_t colon = all.rfind(':');
  const std::string_view given = all.substr(0, colon), host = without_brackets(given);
  if (colon == std::string_view::npos || host.empty() ||
      (host == given && host.find_first_of("[]:") != std::string_view::npos))
    throw DataError(concat("TESSERA_STORE='", text,
                           "' is not host:port; write for example node1:29500 or [fd00::1]:29500"));
  const auto port = parse_port(all.substr(colon + 1));
  if (!port)
    throw DataError(concat("TESSERA_STORE='", text,
                           "' has no port from 1 to 65535 behind its last "
                           "colon; write for example node1:29500"));
  found.store_host = host;
  found.store_port = *port;
  found.store_host_from = found.store_port_from = concat("TESSERA_STORE=", text);
}

// What a step says of its nodes must fit together: with variables of two steps ranks would meet at
// another step's store, or never.
void read_tasks(const char* tasks, const char* node, const char* list, LaunchEnvironment& found) {
  const std::vector<int> counts = expand_counts("SLURM_STEP_TASKS_PER_NODE", tasks);
  const auto counted = [](std::size_t n, const char* what) {
    return concat(n, ' ', what, n == 1 ? "" : "s");
  };
  const auto fail = [&](const auto&... parts) {
    throw DataError(concat(parts..., " SLURM_STEP_TASKS_PER_NODE='", tasks,
                           "'; these are of different steps: start with srun"));
  };
  const auto all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (all != found.world_size)
    fail("SLURM_STEP_NUM_TASKS=", found.world_size, ", against ",
         counted(static_cast<std::size_t>(all), "task"), " in");
  const auto index = static_cast<std::size_t>(integer("SLURM_NODEID", node));
  if (index >= counts.size())
    fail("SLURM_NODEID=", index, " counts from 0, against ", counted(counts.size(), "node"), " in");
  if (list && found.hosts.size() != counts.size())  // which may be long
    fail("SLURM_STEP_NODELIST has ", counted(found.hosts.size(), "host"), ", against ",
         counted(counts.size(), "node"), " in");
  found.local_size = counts[index];
  if (found.local_rank >= found.local_size)
    fail("SLURM_LOCALID=", found.local_rank, " counts from 0, against ",
         counted(static_cast<std::size_t>(found.local_size), "task"), " of SLURM_NODEID=", index,
         " in");
}

// The step's own host list and tasks a node: a job may have more of both. Ports from 61440 on lie
// above those that Linux hands out by itself, and jobs that follow each other get different ones.
void read_step(const EnvironmentLookup& lookup, LaunchEnvironment& found) {
  constexpr int kFirstPort = 61440, kPorts = 4000;
  const char* const list = find(lookup, "SLURM_STEP_NODELIST");
  if (list) {
    found.hosts = expand_hosts("SLURM_STEP_NODELIST", list);
    found.store_host = found.hosts.front();
    found.store_host_from = concat("host ", found.store_host, " of SLURM_STEP_NODELIST");
    const int job = integer_or(lookup, "SLURM_JOB_ID", 0);
    found.store_port = kFirstPort + job % kPorts;
    found.store_port_from = concat("port ", found.store_port, " by SLURM_JOB_ID=", job);
    found.run_id = concat(job, ".", text_or(lookup, "SLURM_STEP_ID", "0"));
  }
  const char *tasks = find(lookup, "SLURM_STEP_TASKS_PER_NODE"),
             *node = find(lookup, "SLURM_NODEID");
  if (tasks && node) read_tasks(tasks, node, list, found);
}

// An Indexed Job's pod is a rank. RANK may say the same; torchrun in each pod sets more than RANK.
void read_pod(const EnvironmentLookup& lookup, LaunchEnvironment& found) {
  constexpr int kUsualPort = 29500;
  if (const char* rank = find(lookup, "RANK"); rank && integer("RANK", rank) != found.rank)
    throw DataError(concat("RANK=", rank, " and JOB_COMPLETION_INDEX=", found.rank,
                           " both say which rank this pod is; unset RANK, or start torchrun in "
                           "each pod"));
  read_master_address(lookup, found);
  found.store_port = kUsualPort;
  found.store_port_from = concat("port ", kUsualPort, " without MASTER_PORT");
  if (const char* text = find(lookup, "MASTER_PORT")) read_master_port(text, found);
  found.local_size = 1;  // that it can see
}

// Where rank 0 can be met, as far as each launcher says it.
void read_meeting(const EnvironmentLookup& lookup, LaunchEnvironment& found) {
  switch (found.launcher) {
    case Launcher::tessera:
      return read_store(lookup("TESSERA_STORE"), found);
    case Launcher::torchrun:
      read_master_address(lookup, found);
      found.run_id = text_or(lookup, "TORCHELASTIC_RUN_ID", "none");
      found.ends_with_parent = find(lookup, "TORCHELASTIC_RUN_ID") != nullptr;
      found.restart_count = integer_or(lookup, "TORCHELASTIC_RESTART_COUNT", 0);
      if (found.several_processes())  // one alone may have port 0
        read_master_port(lookup("MASTER_PORT"), found);
      return;
    case Launcher::kubernetes:
      return read_pod(lookup, found);
    case Launcher::slurm:
      return read_step(lookup, found);
    case Launcher::open_mpi:
    case Launcher::pmi:
    case Launcher::pmix:
    case Launcher::none:
      return;
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
  const bool says_size = find(lookup, set.local_size) != nullptr;
  if (says_size && found.world_size > 0 && found.local_size > found.world_size)
    throw DataError(concat(set.local_size, "=", found.local_size, " is more than ", set.world_size,
                           "=", found.world_size, "; a machine has no more ranks than the job"));
  if (find(lookup, set.local_rank)) {
    found.local_rank_from = concat(set.local_rank, "=", found.local_rank);
    if (says_size)
      expect_below(set.local_rank, found.local_rank, set.local_size, found.local_size);
    else if (found.world_size > 0)
      expect_below(set.local_rank, found.local_rank, set.world_size, found.world_size);
  }
  read_meeting(lookup, found);
  return found;
}

// A set of which something is there although no set is complete, or another one: `whole`.
void refuse_incomplete(const VariableSet& set, const EnvironmentLookup& lookup,
                       const VariableSet* whole = nullptr) {
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
  if (whole)
    throw DataError(concat(present, "=", lookup(present), " is set but not ", missing, ", beside ",
                           whole->rank, "=", integer(whole->rank, lookup(whole->rank)), " of ",
                           name(whole->launcher), "; set what is missing, or unset ", present));
  if (missing.starts_with("LOCAL_RANK"))
    throw DataError(concat("RANK=", integer("RANK", lookup("RANK")), " is set but not ", missing,
                           "; if RANK counts processes, set what is missing; if it counts nodes, "
                           "as in Kubeflow, start torchrun --nnodes=",
                           lookup("WORLD_SIZE"), " --node_rank=", lookup("RANK"),
                           " on each; to run alone, unset RANK"));
  throw DataError(concat(present, "=", lookup(present), " is set but not ", missing,
                         ": this is not a whole ", name(set.launcher),
                         " environment; set what is missing, or unset ", present, " to run alone"));
}

// A pod to which WORLD_SIZE was told is one of a job; where torchrun started it, it has RANK, too.
void refuse_pod_without_address(const EnvironmentLookup& lookup) {
  const char* const index = find(lookup, "JOB_COMPLETION_INDEX");
  const char* const size = find(lookup, "WORLD_SIZE");
  if (!index || !size || find(lookup, "RANK") || find(lookup, "MASTER_ADDR")) return;
  throw DataError(concat("JOB_COMPLETION_INDEX=", index, " and WORLD_SIZE=", size,
                         " are set but not MASTER_ADDR: set it to the host of index 0, or unset "
                         "WORLD_SIZE to run each pod alone"));
}

}  // namespace

LaunchEnvironment detect(const EnvironmentLookup& lookup) {
  for (const VariableSet& set : sets()) {
    bool complete = true;
    for (const char* variable : set.required) complete = complete && find(lookup, variable);
    if (!complete) continue;
    // Nobody but a user sets what is Tessera's own; other launchers run inside each other.
    if (&set != &sets().front()) refuse_incomplete(sets().front(), lookup, &set);
    return read(set, lookup);
  }
  refuse_pod_without_address(lookup);
  for (const VariableSet& set : sets()) refuse_incomplete(set, lookup);

  LaunchEnvironment alone;
  for (const char* variable : {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NTASKS", "SLURM_PROCID"}) {
    if (!find(lookup, variable)) continue;
    alone.notice = concat(variable, "=", lookup(variable),
                          " is a Slurm allocation without a step: this process runs alone; start "
                          "several with srun or mpirun");
    break;
  }
  if (const char* index = find(lookup, "JOB_COMPLETION_INDEX"); index && alone.notice.empty())
    alone.notice =
        concat("JOB_COMPLETION_INDEX=", index,
               " is set but not WORLD_SIZE and MASTER_ADDR: this pod runs alone; set both "
               "for a job of all pods");
  return alone;
}

int job_size(const LaunchEnvironment& environment, std::optional<int> ranks) {
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
