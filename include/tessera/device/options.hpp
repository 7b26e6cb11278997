// How Device::cpu and Device::cuda are asked for a device.
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
  bool run_bodies = false;                     // on `virtual`, which else only counts
};

// Where a GPU's memory comes from.
enum class CudaMemory : std::uint8_t {
  pieces,  // allocations of the driver; they can't grow
  mapped,  // addresses set aside once, memory mapped behind them as they grow
};

struct CudaOptions {
  int index = 0;  // of the device in this machine; several ranks may share one
  int rank = 0;
  // Or `virtual_`: a plan, for which neither module nor device is needed.
  ExecutorKind executor = ExecutorKind::cuda;
  CostModel cost{};  // of `virtual`
  CudaMemory memory = CudaMemory::pieces;
  int threads = 1;  // per rank, for kernels of the host's side
  // f32 products may round their operands to 11 significant bits: TF32, on tensor cores.
  bool tf32 = false;
  // The same bits from every run. Without, attention's backward pass of 16-bit heads may add up in
  // any order, faster for long sequences; as torch.use_deterministic_algorithms(False).
  bool deterministic = true;
  // The driver module's file. Empty: libtessera-cuda.so near this library, or where the system
  // looks.
  std::string module{};
};

}  // namespace tessera
