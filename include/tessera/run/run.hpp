// The outermost call of a program: finds the ranks, runs its body on each, and turns errors into
// one line and an exit code. Only a main calls it. It alone reads the environment for options and
// writes to stderr.
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
  std::optional<int> ranks{};  // as threads of this process; unset: what the launcher says, else 1
  WorldOptions world{};
};

// Calls `body` once per rank of the job and returns the exit code: 0 done, 2 bad input (DataError),
// 1 anything else; threads and processes alike, and also where nobody waits for what failed: it
// closes with World::end. Of an error that every rank meets, one rank writes the line. With
// TESSERA_CHECK=1 (see run/race_check.hpp), or with a checker in `world`, it closes with a line of
// what the race checker found; a race makes a 0 a 1.
int run(const RunOptions& options, const std::function<void(World&)>& body);

// Its pieces, for programs that report in their own way.
//
// The ranks alone: this process's one of the launcher's job, or `ranks` threads; calls `body` once
// for each that is here. What it throws comes out, nothing is printed.
// Processes meet through MPI where mpirun, srun --mpi=pmix or the like has started them and this
// build has MPI, else by World::processes: torchrun, srun and MPICH's mpiexec, on one machine.
// Throws: DataError as job_size; what World::mpi and World::processes throw.
void run_ranks(const LaunchEnvironment& environment, std::optional<int> ranks,
               const WorldOptions& options, const std::function<void(World&)>& body);

// What a program ends with that `error` ended: 2 for bad input (DataError), 1 for anything else.
int exit_code(const std::exception_ptr& error = std::current_exception());

// "cpu"; "cuda", see DeviceChoice::index; "cuda:1" for the second GPU.  Throws: DataError for
// anything else.
DeviceChoice parse_device(std::string_view name);

// The same for small programs: takes `--ranks N` and `--threads N`, 1 to 4096, and `--device NAME`
// from the command line and leaves the rest alone. What is wrong is a line on stderr and exit code
// 2. TESSERA_CUDA_MODULE names the driver module, where it is not near the program, and
// TESSERA_NCCL the file of NCCL, where it is not where World::nccl looks.
int run(int argc, char** argv, const std::function<void(World&)>& body);

}  // namespace tessera
