// What only tests ask of a world: that one machine stands for several hosts.
#pragma once

#include <vector>

namespace tessera::comm {

// Worlds over MPI that are made while this lives take rank r to be on host `hosts[r]`: ranks of
// different numbers share no memory and do not see each other. One at a time.
//
//   const comm::PretendedHosts hosts({0, 0, 1, 1});
class PretendedHosts {
 public:
  explicit PretendedHosts(std::vector<int> hosts);
  ~PretendedHosts();
  PretendedHosts(const PretendedHosts&) = delete;
  PretendedHosts& operator=(const PretendedHosts&) = delete;

  static int host_of(int rank);  // for World::mpi: 0 for all where nothing is pretended
};

}  // namespace tessera::comm
