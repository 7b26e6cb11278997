// Memory that processes of one machine share by names in /dev/shm, which it has only until all of
// them have mapped it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime/comm/processes/bootstrap.hpp"

namespace tessera::comm {

// A part for each rank. Whoever goes first takes the names of all parts away, also of a rank that
// was killed, and where something goes wrong on the way.
class PosixMemory final : public SharedMemory {
 public:
  PosixMemory(std::string name, int ranks, std::int64_t bytes);
  ~PosixMemory() override { forget_names(); }

  // This rank's part, all zero. Its pages are there: where /dev/shm is too small that is an error
  // here, and not a signal at the first touch.  Throws: CommError.
  void make(int rank);
  // Another's part, unless it is there already; false where this machine has none of that name.
  // Throws: CommError where it can't be mapped.
  bool map(int rank);
  void forget_names() noexcept;
  // Each rank unmaps for itself: what peers have mapped stays theirs.
  void free() noexcept override;

 private:
  std::string name_of(int rank) const;
  std::byte*& part(int rank) { return bases_[static_cast<std::size_t>(rank)]; }

  std::string name_;  // empty: the names are gone
  const std::int64_t bytes_;
};

}  // namespace tessera::comm
