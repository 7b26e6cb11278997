// Ranks of World::nccl over a double of NCCL, each on an emulated GPU of its own.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/free_port.hpp"

namespace tessera::testing {

using NcclBody = std::function<std::string(World&)>;
// Makes the options of one rank others than those of all.
using Adapt = std::function<void(int rank, WorldOptions&)>;

// One of the functions by which tests steer the double.
template <class F>
F* double_call(const char* name) {
  void* const library = dlopen(TESSERA_NCCL_DOUBLE, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) throw std::runtime_error(dlerror());
  return reinterpret_cast<F*>(dlsym(library, name));
}

// See tessera_nccl_double_count.
inline long long double_count(const char* what) {
  return double_call<long long(const char*)>("tessera_nccl_double_count")(what);
}

inline WorldOptions over_the_double(WorldOptions options, int rank) {
  options.device = {.kind = DeviceKind::cuda, .index = rank, .module = TESSERA_QUEUED_MODULE};
  options.threads = 1;
  options.init_timeout_seconds = 30;
  options.nccl.module = TESSERA_NCCL_MODULE;
  options.nccl.library = TESSERA_NCCL_DOUBLE;
  return options;
}

// What `body` says on each rank, or "threw: ..."; an exception in it ends its world.
inline std::string say(const ProcessSeat& seat, const WorldOptions& given, const NcclBody& body,
                       const Adapt& adapt = {}) {
  try {
    WorldOptions options = over_the_double(given, seat.rank);
    if (adapt) adapt(seat.rank, options);
    World world = World::nccl(seat, options);
    std::string said;
    try {
      said = body(world);
    } catch (const std::exception& error) {
      world.end(error.what());
      throw;
    }
    world.end();
    return said;
  } catch (const std::exception& error) {
    return concat("threw: ", error.what());
  }
}

inline std::vector<std::string> nccl_threads(int ranks, const NcclBody& body,
                                             const WorldOptions& options = {},
                                             const Adapt& adapt = {}) {
  const Gpus gpus(ranks);
  const int port = free_port();
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      const ProcessSeat seat{.rank = rank, .size = ranks, .port = port};
      said[static_cast<std::size_t>(rank)] = say(seat, options, body, adapt);
    });
  threads.clear();
  return said;
}

inline std::vector<std::string> nccl_processes(
    int ranks, const NcclBody& body, const WorldOptions& options = {}, const Adapt& adapt = {},
    const std::function<void(std::span<const pid_t>)>& meanwhile = [](std::span<const pid_t>) {}) {
  const int port = free_port();
  const std::vector<Ended> all = run_forked(
      ranks,
      [&](int rank) {
        const Gpus gpus(ranks);
        const ProcessSeat seat{.rank = rank, .size = ranks, .port = port};
        return say(seat, options, body, adapt);
      },
      meanwhile);
  std::vector<std::string> said;
  for (const Ended& ended : all) said.push_back(ended.said);
  return said;
}

}  // namespace tessera::testing
