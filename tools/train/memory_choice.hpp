// What a run leaves open is chosen by memory: of the ways to compute a step, from the fastest to
// the one that needs least, the first whose plan fits. All ranks choose alike.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tools/train/memory_plan.hpp"

namespace tessera::train {

struct Chosen {
  Config config;     // with the choice in place of what was left open
  MemoryPlan plan;   // of this rank, of it
  std::string told;  // a line for people, empty where nothing was to choose
};

// memory.limit, else this rank's part of the memory of its GPU, the least of all ranks; unset on a
// CPU. Collective.
std::optional<std::int64_t> memory_limit(const Config& config, const World& world);

// `plan_of`: a rank's plan of a configuration; `most`: the largest of a number over all ranks.
// Without a limit what needs least is chosen.
// Throws: OutOfMemory where there is a limit and nothing fits.
Chosen choose_by_memory(const Config& config, std::optional<std::int64_t> limit,
                        const std::function<MemoryPlan(const Config&)>& plan_of,
                        const std::function<double(double)>& most);

// The choice of a rank of `world` for a run whose evaluations take `heldout_samples` samples, and
// no windows of NCCL where there is no NCCL. Collective.  Throws: as choose_by_memory.
Chosen choose_for(Config config, const World& world, std::int64_t heldout_samples);

// Throws: OutOfMemory where this machine has too little for its ranks, each with `weight_bytes` of
// all ranks' weights at the least. A system without that much would kill the process without a
// line. A GPU's driver says it.
void check_machine(const MemoryPlan& plan, const World& world, std::int64_t weight_bytes);

// What is set aside in all phases of a run, in a plan, with what NCCL takes where that counts.
std::int64_t reserved_bytes(const MemoryPlan& plan);

}  // namespace tessera::train
