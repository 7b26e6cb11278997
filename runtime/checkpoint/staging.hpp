// Memory of the host that has a rank's values from a save on until they are written.
//
//   compute    step 100 ─┐        ┌─ step 101 may change the values
//   transfer             └ copies ┘
//   host       submits that                  blocks ── its writer reads
#pragma once

#include <memory>
#include <vector>

#include "runtime/checkpoint/rank_file.hpp"
#include "tessera/device/device.hpp"
#include "tessera/tensor/storage.hpp"

namespace tessera::checkpoint {

class Staging {
 public:
  explicit Staging(const Device& device) : host_(device.host()) {}

  // Copies the values of these files behind all that was submitted before, and lets go of them.
  // Requires: nobody reads what was copied last any more.  Throws: OutOfMemory; ContractError for a
  // parameter without memory.
  void copy(std::vector<RankFile>& files);
  // The host blocks until the copies are made.
  void block() const;

 private:
  Device host_;
  std::shared_ptr<Storage> memory_;  // as much as any save has needed
};

}  // namespace tessera::checkpoint
