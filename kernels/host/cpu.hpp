// The CPU's bodies by name: each defined in kernels/<op>.cpp, collected in
// kernels/kernel_table.cpp.
#pragma once

#include "kernels/kernel_table.hpp"

namespace tessera::kernels::cpu {

#define TESSERA_KERNEL(name, Args) void name(const Args&, Exec&);
#include "kernels/kernels.def"

}  // namespace tessera::kernels::cpu
