// The outermost call of a program. It finds the ranks, runs the program's body on each, and turns
// errors into one line and an exit code. Only a main calls it. It alone reads the environment for
// options, and writes to stderr.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/world.hpp"
#include "tessera/run/environment.hpp"

namespace tessera {

struct RunOptions {
  std::string program = "tessera";  // opens every line on stderr
  std::optional<int> ranks{};       // threads of this process; unset: as the launcher says, or 1
  WorldOptions world{};
};

// Calls `body` once per rank of the job and returns the exit code: 0 done, 2 bad input (DataError),
// 1 anything else. Of processes, each ends with its own: if one alone meets bad input, the others
// end with 1, and tell of it. It closes with World::end, so a failure that nobody waited for
// counts, too. If every rank meets one error, one rank writes the line. With TESSERA_CHECK=1 (see
// run/race_check.hpp), or with a checker in `world`, it closes with a line of what the race checker
// found. A race makes a 0 a 1.
int run(const RunOptions& options, const std::function<void(World&)>& body);

// The pieces of run, for programs that report in their own way.
//
// Runs the ranks, and no more: this process's rank of the launcher's job, or `ranks` threads. It
// calls `body` once for each rank that is here. What `body` throws comes out, and nothing is
// printed. Processes meet through MPI if mpirun, srun --mpi=pmix or the like has started them and
// this build has MPI. Otherwise they meet by World::processes, on one machine: torchrun, srun and
// MPICH's mpiexec.
// Throws: DataError as job_size; what World::mpi and World::processes throw.
void run_ranks(const LaunchEnvironment& environment, std::optional<int> ranks,
               const WorldOptions& options, const std::function<void(World&)>& body);

// The exit code of a program that `error` ends: 2 for bad input (DataError), 1 for anything else.
int exit_code(const std::exception_ptr& error = std::current_exception());

// The device of a name: "cpu"; "cuda", see DeviceChoice::index; "cuda:1" for the second GPU.
// Throws: DataError for any other name.
DeviceChoice parse_device(std::string_view name);

// Runs a small program: it takes `--ranks N` and `--threads N`, 1 to 4096, and `--device NAME` from
// the command line, and leaves the rest alone. A wrong value is a line on stderr and exit code 2.
// TESSERA_CUDA_MODULE names the driver module, if it is not near the program. TESSERA_NCCL names
// the file of NCCL, if it is not where World::nccl looks.
int run(int argc, char** argv, const std::function<void(World&)>& body);

}  // namespace tessera
