// Ranks that are processes of one machine, taken to lie on several hosts.
#pragma once

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/comm/testing.hpp"
#include "tests/comm/mpi_keeper.hpp"

using tessera::comm::PretendedHosts;
using Hosts = std::vector<int>;  // of each rank

// All ways to lay out as many ranks as there are on at least two hosts: 2 + 2, 3 + 1, 1 + 3,
// interleaved, three and more hosts.
inline std::vector<Hosts> placements() {
  std::vector<Hosts> all{{0}};
  for (int r = 1; r < keeper().size(); ++r) {
    std::vector<Hosts> longer;
    for (const Hosts& hosts : all)
      for (int h = 0; h <= *std::ranges::max_element(hosts) + 1; ++h) {
        longer.push_back(hosts);
        longer.back().push_back(h);
      }
    all = std::move(longer);
  }
  std::erase_if(all, [](const Hosts& hosts) { return *std::ranges::max_element(hosts) == 0; });
  return all;
}

inline std::string to_string(const Hosts& hosts) {
  std::string text = "hosts";
  for (const int h : hosts) text += tessera::concat(' ', h);
  return text;
}

// No host has two of the ranks.
inline bool is_flat(const Hosts& hosts) {
  return std::set(hosts.begin(), hosts.end()).size() == hosts.size();
}

// One in which some host has two ranks, where there are more than two ranks.
inline Hosts draw_hosts(std::mt19937_64& draw) {
  std::vector<Hosts> all = placements();
  if (keeper().size() > 2) std::erase_if(all, is_flat);
  return all[draw() % all.size()];
}
