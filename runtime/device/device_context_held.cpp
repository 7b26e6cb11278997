// See HoldGuard: what a DeviceContext does with what is held.
#include <algorithm>
#include <utility>

#include "tessera/device/device_context.hpp"

namespace tessera {

void DeviceContext::hold(const Op& op, const Body& body,
                         std::span<const std::shared_ptr<const void>> storages) {
  if (held_.size() == kMostHeld) submit_all_held();
  Held held{op.name, op.cost, {}, {}, op.accesses.size(), body};
  std::ranges::copy(op.accesses, held.accesses.begin());
  std::ranges::copy(storages, held.storages.begin());
  held_.push_back(std::move(held));
}

void DeviceContext::submit_all_held() {
  for (const Held& held : std::exchange(held_, {}))
    submit(StreamId::compute,
           {.name = held.name, .cost = held.cost, .accesses = {held.accesses.data(), held.count}},
           held.body, nullptr);
}

void DeviceContext::submit_kept(const void* result) {
  const auto is_kept = [&](const std::shared_ptr<const void>& storage) {
    long owners = storage.get() == result ? 1 : 0;
    for (const Held& held : held_) owners += std::ranges::count(held.storages, storage);
    return storage.use_count() > owners;
  };
  for (const Held& held : held_)
    for (std::size_t i = 0; i < held.count; ++i)
      if (held.accesses[i].mode == AccessMode::write && is_kept(held.storages[i]))
        return submit_all_held();
}

}  // namespace tessera
