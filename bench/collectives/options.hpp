// The command line of bench-collectives: the options of nccl-tests, by their letters and names, and
// its own. Reads nothing else and starts nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::collectives {

// What is measured, by nccl-tests' names (its programs are all_reduce_perf and so on).
struct Operation {
  const char* name;
  CollectiveKind kind;
};

// The options as nccl-tests spells them; sizes in bytes.
struct Options {
  std::vector<Operation> operations;
  std::int64_t min_bytes = 32 << 20, max_bytes = 32 << 20, step_bytes = 1 << 20;
  double step_factor = 1;  // of nccl-tests: above 1 it stands in the place of step_bytes
  std::vector<DType> dtypes{f32};
  std::vector<ReduceOp> reductions{ReduceOp::sum};
  std::vector<int> roots{0};
  bool all_roots = false;
  int iters = 20, warmup = 5, checks = 1;
  int average = 1;             // what is reported of all ranks: rank 0's time, mean, least, most
  std::optional<int> threads;  // ranks of this process: -t times -g
  // Ours.
  int groups = 1;              // of consecutive ranks, which all run at once
  std::optional<int> emulate;  // so many ranks, of which one is real
  bool beside_compute = false;
  WorldOptions world{};
  bool help = false;
};

// Throws: DataError with one line that names the option, its value and what is expected.
Options parse(const std::vector<std::string>& arguments);
std::string help();

// "float", "half": nccl-tests' names.
const char* nccl_name(DType dtype);

}  // namespace tessera::collectives
