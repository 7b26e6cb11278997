// The options of Device::cpu and Device::cuda.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/device/executor.hpp"

namespace tessera {

struct CpuOptions {
  ExecutorChoice executor{};
  int rank = 0;
  int threads = 1;                             // per rank, for kernels that split their work
  std::shared_ptr<HostScheduler> scheduler{};  // shared by the ranks of a world; null for none
  CostModel cost{};                            // of `virtual`: how long operations take
  bool run_bodies = false;                     // on `virtual`, which otherwise only counts
};

// Where a GPU's memory comes from.
enum class CudaMemory : std::uint8_t {
  pieces,  // allocations of the driver; they can't grow
  mapped,  // addresses set aside once, memory mapped behind them as they grow
};

struct CudaOptions {
  int index = 0;  // of the device in this machine; several ranks may share one
  int rank = 0;
  // `cuda`, or `virtual_`: a plan, which needs neither module nor device.
  ExecutorKind executor = ExecutorKind::cuda;
  CostModel cost{};  // of `virtual`
  CudaMemory memory = CudaMemory::pieces;
  int threads = 1;  // per rank, for kernels of the host's side
  // Whether f32 products may round their operands to 11 significant bits: TF32, on tensor cores.
  bool tf32 = false;
  // Whether every run gives the same bits. If not, attention's backward pass of 16-bit heads may
  // add up in any order, which is faster for long sequences
  // (torch.use_deterministic_algorithms(False)).
  bool deterministic = true;
  // The driver module's file. Empty: libtessera-cuda.so near this library, or where the system
  // looks for libraries.
  std::string module{};
};

}  // namespace tessera
