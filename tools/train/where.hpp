// `tessera-train --where`: what a launcher has told this process, and what its machine has.
#pragma once

#include <exception>
#include <string>

#include "tessera/run/environment.hpp"

namespace tessera::train {

// Lines for people: the variables that say who this process is, its rank, hosts, the store with the
// interface that leads to it, GPUs, NCCL's file and version, and warnings. Reads the environment
// and the system, loads NCCL's library, and starts nothing: no GPU is touched, nobody is called but
// the system's resolver. Where the variables are wrong, `broken` is null no longer, and the lines
// are those that need no rank.
std::string where_text(std::exception_ptr& broken);

}  // namespace tessera::train
