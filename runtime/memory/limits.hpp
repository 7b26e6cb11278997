// What limits memory besides the pool's own count, for the pool's message when there is no more.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

// ", the limit is ..." of a pool whose limit this is, 0 for none, and that of addresses.
std::string describe_limits(std::int64_t limit);

}  // namespace tessera
