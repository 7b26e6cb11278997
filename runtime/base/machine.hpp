// What the machine, and whoever started the process, gives it.
#pragma once

#include <cstdint>

namespace tessera {

// The memory of the whole machine, whoever uses it; 0 where the system does not tell.
std::int64_t physical_memory_bytes();

// The addresses that this process may have (ulimit -v); 0 for no limit.
std::int64_t address_limit_bytes();

}  // namespace tessera
