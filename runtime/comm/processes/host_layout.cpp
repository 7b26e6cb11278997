#include "runtime/comm/processes/host_layout.hpp"

#include <algorithm>

namespace tessera::comm {

HostLayout::HostLayout(std::span<const int> host_of, int rank) : rank_(rank) {
  std::vector<int> names;
  for (std::size_t r = 0; r < host_of.size(); ++r) {
    const auto at = static_cast<std::size_t>(std::ranges::find(names, host_of[r]) - names.begin());
    if (at == names.size()) {
      names.push_back(host_of[r]);
      members_.emplace_back();
    }
    host_.push_back(static_cast<int>(at));
    number_.push_back(static_cast<int>(members_[at].size()));
    members_[at].push_back(static_cast<int>(r));
  }
  std::vector<int> served(host_of.size());  // how many each rank serves
  for (int r = 0; r < static_cast<int>(host_of.size()); ++r) {
    slots_.push_back(0);
    for (int h = 0; h < hosts(); ++h) {
      if (h == host(r)) continue;
      int& count = served[static_cast<std::size_t>(partner(h, r))];
      if (h == own_host()) slots_.back() = count;
      ++count;
      if (partner(h, r) == rank) served_.push_back(r);
    }
  }
  most_served_ = std::ranges::max(served);
}

int HostLayout::partner(int host, int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  const std::vector<int>& there = members_[static_cast<std::size_t>(host)];
  return there[static_cast<std::size_t>(number_[r]) % there.size()];
}

}  // namespace tessera::comm
