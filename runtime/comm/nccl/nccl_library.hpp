// Finds, loads and checks the module behind which NCCL stands. Called by World::nccl alone.
#pragma once

#include "kernels/nccl/nccl_driver.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// Of the module of `options`, or libtessera-nccl.so where libtessera-cuda.so is looked for, too. It
// has opened NCCL; `library` says which.  Throws: CommError, in one line, where the module is
// absent or of another version of Tessera, or has found no NCCL that is new enough.
const kernels::NcclDriver& open_nccl(const NcclOptions& options, kernels::NcclLibrary& library);

// The first NCCL whose gathers can do without CTAs.
inline constexpr int kZeroCtasFrom = 22800;

// "2.28.9" of 22809
std::string nccl_version(int version);

}  // namespace tessera::comm
