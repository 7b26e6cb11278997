// Where the pools of a device, or of the host beside it, get their memory.
#pragma once

#include <memory>

#include "tessera/detail/memory/upstream.hpp"

namespace tessera {

std::unique_ptr<Upstream> upstream_of(DeviceContext& context, MemorySide side);

}  // namespace tessera
