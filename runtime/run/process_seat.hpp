// Where the processes of a launcher's job meet.
#pragma once

#include "tessera/comm/world.hpp"
#include "tessera/run/environment.hpp"

namespace tessera {

// The seat of this process: at the address that the launcher gives, or, where it gives none, on
// this machine, at a port that is drawn from what it gives all ranks alike:
//
//   PMI              the process at the other end of PMI_FD, which has started the ranks
//   Open MPI, PMIx   PMIX_NAMESPACE
//
// Throws: DataError where there is no address, and ranks are on several machines.
ProcessSeat process_seat(const LaunchEnvironment& environment, const EnvironmentLookup& lookup);

}  // namespace tessera
