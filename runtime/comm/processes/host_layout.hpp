// Which ranks of a group lie on which host, and through whom they exchange. Pure arithmetic: every
// rank comes to the same.
//
//   host 0    0   2   4       ranks and their partners on the other host:
//             │ ╲ │           0 and 1, 2 and 3, 4 and 1; 1 and 0, 3 and 2
//   host 1    1   3           so rank 1 serves 0 and 4, rank 3 serves 2
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera::comm {

class HostLayout {
 public:
  // `host_of` tells ranks of one host from those of others. Hosts are numbered by their first rank.
  HostLayout(std::span<const int> host_of, int rank);

  int hosts() const noexcept { return static_cast<int>(members_.size()); }
  int host(int rank) const { return host_[static_cast<std::size_t>(rank)]; }
  int own_host() const { return host(rank_); }
  // Its number among the ranks of its host.
  int number(int rank) const { return number_[static_cast<std::size_t>(rank)]; }
  // The ranks of this one's host, itself too, in their order.
  std::span<const int> peers() const { return members_[static_cast<std::size_t>(own_host())]; }
  bool is_alone() const { return peers().size() == 1; }
  bool is_flat() const noexcept { return members_.size() == host_.size(); }  // no host has two

  // The rank of `host` that sends to `rank` and receives from it; on its own host itself.
  int partner(int host, int rank) const;
  // The ranks of other hosts whose partner this one is, in their order.
  const std::vector<int>& served() const noexcept { return served_; }
  // Where `rank`, of another host, is among those whom its partner here serves.
  int slot(int rank) const { return slots_[static_cast<std::size_t>(rank)]; }
  int most_served() const noexcept { return most_served_; }  // by any rank

 private:
  int rank_;
  std::vector<int> host_, number_;
  std::vector<std::vector<int>> members_;
  std::vector<int> served_, slots_;
  int most_served_ = 0;
};

}  // namespace tessera::comm
