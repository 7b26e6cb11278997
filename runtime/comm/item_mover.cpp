#include "runtime/comm/item_mover.hpp"

#include <algorithm>

namespace tessera::comm {

void ItemMover::finish() const {
  if (!link_ || link_->copies.empty()) return;
  if (!exec_.error)
    exec_.error = exec_.driver->copy_all(
        link_->copies.data(), static_cast<std::int32_t>(link_->copies.size()), exec_.native_stream);
  link_->copies.clear();
}

// Block by block, as many elements as fit from each far peer; the next block's copies follow this
// block's sum on the stream. Elements are added one by one, so the bits are those of one sum.
void ItemMover::reduce_far(void* out, const void* const* inputs, int size, std::int64_t count,
                           const Collective& c) const {
  const auto element = static_cast<std::int64_t>(size_bytes(c.dtype));
  const std::int64_t fars = std::count(link_->far.begin(), link_->far.end(), 1);
  const std::int64_t most = kLandingBytes / std::max<std::int64_t>(fars, 1) / 256 * 256 / element;
  std::vector<const void*>& near = link_->near;
  near.resize(static_cast<std::size_t>(size));
  for (std::int64_t first = 0; first < count && !exec_.error; first += most) {
    const std::int64_t n = std::min(most, count - first);
    std::byte* landing = link_->landing.get();
    for (std::size_t peer = 0; peer < near.size(); ++peer) {
      near[peer] = static_cast<const std::byte*>(inputs[peer]) + first * element;
      if (!link_->far[peer] || exec_.error) continue;
      exec_.error = exec_.driver->copy(landing, near[peer], n * element, exec_.native_stream);
      near[peer] = landing;
      landing += most * element;
    }
    if (!exec_.error)
      kernels_.reduce_peers({static_cast<std::byte*>(out) + first * element, near.data(), n, size,
                             c.dtype, operation(c)},
                            exec_);
  }
}

}  // namespace tessera::comm
