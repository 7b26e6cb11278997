#include "runtime/shard/prepared_groups.hpp"

#include <algorithm>
#include <utility>

#include "tessera/device/device_context.hpp"

namespace tessera::shard {

PreparedGroups::~PreparedGroups() {
  for (auto& prepared : prepared_) device_.context().keep(std::move(prepared));
}

CollectiveGroup& PreparedGroups::next(const char* name) {
  const Tick has_run = device_.context().host_clock()[stream_];
  auto found = std::ranges::find_if(prepared_, [&](const auto& p) { return p->tick <= has_run; });
  if (found == prepared_.end()) found = prepared_.insert(found, std::make_shared<Prepared>());
  Prepared& next = **found;
  next.group.name = name;
  next.tick = device_.context().clock(stream_)[stream_] + 1;
  return next.group;
}

}  // namespace tessera::shard
