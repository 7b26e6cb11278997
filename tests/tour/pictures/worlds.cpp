// What each kind of world is made of: types are asked of the objects, and one all_gather is
// watched.
#include <cxxabi.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <typeinfo>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

// The name of the class, without its namespaces.
template <class T>
std::string type_of(const T& object) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(typeid(object).name(), nullptr, nullptr, &status), std::free);
  const std::string full = name.get();
  return full.substr(full.rfind(':') + 1);
}

// How the ranks of a collective met, as far as the executor sees it.
class Watcher final : public Observer {
 public:
  void executor_launched(StreamId, Tick, const Op&,
                         const CollectiveBarrier* barrier) noexcept override {
    ++operations;
    ranks_at_barrier = barrier ? barrier->size() : 0;
  }
  int operations = 0, ranks_at_barrier = 0;
};

Watcher watch_an_all_gather(const World& world, const SymmetricMemory& memory) {
  auto* const data = reinterpret_cast<float*>(memory.data());
  LastUse use;
  const Access access{&use, data, data + world.size(), AccessMode::write};
  Watcher watcher;
  world.device().context().add_observer(watcher);
  world.gather().submit(
      {.send = data + world.rank(), .recv = data, .count = 1, .kind = CollectiveKind::all_gather},
      "all_gather", {&access, 1});
  world.device().synchronize();
  world.device().context().remove_observer(watcher);
  return watcher;
}

std::string how_they_meet(const World& world, const Watcher& watcher) {
  if (watcher.operations == 0) return "no operation: in place there is nothing to move";
  if (watcher.ranks_at_barrier > 0)
    return concat("1 operation, which ", watcher.ranks_at_barrier,
                  " ranks enter and leave at a CollectiveBarrier");
  return world.kind() == WorldKind::emulated
             ? "1 operation, which meets nobody and makes the peers' chunks up"
             : "1 operation, in whose body the processes meet";
}

std::string describe(const World& world, const char* made_by) {
  const double pid = getpid();
  const bool one_process = world.max(pid) == -world.max(-pid);
  const auto memory = world.allocate_symmetric(4096);
  const SymmetricMemory& symmetric = *memory;
  const Watcher watcher = watch_an_all_gather(world, symmetric);
  const char* const peers = world.kind() == WorldKind::emulated ? "no peers"
                            : world.size() == 1                 ? "alone"
                            : one_process                       ? "threads of one process"
                                                                : "processes";
  std::string text = concat(padded(made_by, 42), name(world.kind()), ", rank ", world.rank(),
                            " of ", world.size(), ", ", peers, '\n');
  for (const Communicator* c : {&world.gather(), &world.reduce(), &world.control()})
    text += concat(c == &world.control() ? "  └─ " : "  ├─ ", padded(c->role(), 8), type_of(*c),
                   " on stream ", name(c->stream()), '\n');
  return text + concat("     an all_gather is ", how_they_meet(world, watcher), '\n',
                       "     its memory is ", type_of(symmetric), "\n\n");
}

}  // namespace

std::string worlds() {
  const WorldOptions options{.threads = 1};
  WorldOptions messages = options;
  messages.transport = Transport::messages;
  const World processes = World::mpi(options), senders = World::mpi(messages);
  const World joined = World::processes(
      {.rank = processes.rank(),
       .size = processes.size(),
       .run_id = concat("pictures ", processes.max(static_cast<double>(getpid())))},
      options);
  std::string text;
  run_local(2, options, [&](World& world) {
    const std::string drawn = describe(world, "run_local(2, ...)");
    if (world.rank() == 0) text += drawn;
  });
  text += describe(processes, "World::mpi(), under mpirun -n 2");
  text += describe(senders, "World::mpi({.transport = messages})");
  text += describe(joined, "World::processes({...}), of 2");
  text += describe(World::emulated(3, 8, options), "World::emulated(3, 8)");
  text += describe(World::single(options), "World::single()");
  return processes.rank() == 0 ? text : "";
}

}  // namespace tessera::pictures
