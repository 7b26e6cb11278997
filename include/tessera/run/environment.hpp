// Which launcher started this process, and which rank of which world it is. These are pure
// functions of the environment variables, so a test can hand in any environment. `ts::run` and the
// mains of tools/ and bench/ call them. They read nothing else, start nothing and print nothing.
//
// The first *complete* set wins, and two sets are never mixed:
//
//   Tessera     TESSERA_RANK, TESSERA_WORLD_SIZE and TESSERA_STORE (host:port)
//   torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
//   Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE
//   PMI         PMI_RANK and PMI_SIZE (MPICH and Intel MPI)
//   Slurm step  SLURM_PROCID and SLURM_STEP_NUM_TASKS
//   PMIx        PMIX_RANK and PMIX_NAMESPACE
//   Kubernetes  JOB_COMPLETION_INDEX, WORLD_SIZE and MASTER_ADDR: a pod is a rank
//   none        one process
//
// Slurm comes after the launchers that run inside its steps. PMIx comes behind it, because its
// environment does not tell the size of the world.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class Launcher : std::uint8_t {
  none,
  torchrun,
  open_mpi,
  pmi,
  slurm,
  pmix,
  tessera,
  kubernetes
};

constexpr std::string_view name(Launcher launcher) {
  constexpr std::string_view names[] = {"none",  "torchrun", "Open MPI", "PMI",
                                        "Slurm", "PMIx",     "Tessera",  "Kubernetes"};
  return names[static_cast<int>(launcher)];
}

// What the environment says. A size is 0 if the launcher does not tell it.
struct LaunchEnvironment {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int world_size = 1;           // 0 under bare PMIx: MPI_Init knows it
  int local_rank = 0;           // among the ranks of this machine
  std::string local_rank_from;  // "LOCAL_RANK=0"; empty if nobody says it
  int local_size = 1;           // ranks on this machine; 0: unknown
  // Where rank 0 can be met: the host's name or address, and the first port. Empty and 0 if the
  // launcher does not tell; then its own library knows.
  std::string store_host;
  int store_port = 0;
  // What gave them, for messages: "MASTER_ADDR=node1", "MASTER_PORT=29500".
  std::string store_host_from, store_port_from;
  std::string run_id = "none";  // the job's, the same for each attempt
  int restart_count = 0;        // may differ between the hosts of a job
  // Whether the launcher is to watch this process for as long as it runs: torchrun's agent is.
  bool ends_with_parent = false;
  std::vector<std::string> hosts;  // a Slurm step's; otherwise empty
  std::string notice;              // a line for the user, empty if there is nothing to say

  // Whether peers exist, or may exist, in other processes.
  bool several_processes() const { return world_size != 1; }
};

// Looks a variable up; null if it is not set. `std::getenv` fits.
using EnvironmentLookup = std::function<const char*(const char* variable)>;

// Reads the environment by the rules above. An allocation of Slurm without a step is one process,
// and gives a notice.
//
// Throws: DataError that names the variable and its value. It does so if the chosen set holds a
// value that is no integer, or a rank that is not below its size. It does so, too, if a set is
// begun but not complete and no other set is complete. RANK without LOCAL_RANK is such a set: some
// launchers count nodes by it. Tessera's own set must be complete, whatever else is. Variables of
// one set that contradict each other are an error that names both.
LaunchEnvironment detect(const EnvironmentLookup& lookup);

// The number of ranks in the job: `ranks` threads of one process, or the launcher's processes. 0:
// only MPI_Init knows.
//
// Throws: DataError if `ranks` is given (`--ranks N`) in a launcher's world larger than 1.
int job_size(const LaunchEnvironment& environment, std::optional<int> ranks);

}  // namespace tessera
