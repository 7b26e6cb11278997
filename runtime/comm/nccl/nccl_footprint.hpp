// Measures what NCCL takes of its GPU by itself: when a communicator is made, and when it first
// connects to its peers. Nothing else may allocate meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/comm/planned_nccl.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {

// Adds what is taken in its scope to the ledger's line, or takes off what is given back. Where the
// driver can't tell, nothing.
class NcclFootprint {
 public:
  explicit NcclFootprint(DeviceContext& context)
      : context_(context), ledger_(Memory::of(context).ledger()), before_(free_bytes()) {}
  ~NcclFootprint() {
    const std::int64_t now = free_bytes();
    if (now <= 0 || before_ <= 0) return;
    ledger_.add_outside(kMeasuredNccl,
                        std::max(before_ - now, -ledger_.outside_bytes(kMeasuredNccl)));
  }
  NcclFootprint(const NcclFootprint&) = delete;
  NcclFootprint& operator=(const NcclFootprint&) = delete;

 private:
  std::int64_t free_bytes() const {
    std::int64_t free = 0, total = 0;
    return context_.acting_driver().memory_info(&free, &total) ? 0 : free;
  }

  DeviceContext& context_;
  Ledger& ledger_;
  const std::int64_t before_;
};

}  // namespace tessera::comm
