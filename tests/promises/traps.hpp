// An exception at a place of the test's choice: as an operation is launched, starts or ends, at an
// event, where the pool is asked for memory, or in the model's own code. trials.hpp tries them all.
#pragma once

#include <array>
#include <atomic>
#include <stdexcept>
#include <string_view>

#include "runtime/memory/testing.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/share.hpp"

namespace tessera::testing {

enum class Trap : std::uint8_t {
  none,
  launch,      // as the host submits an operation
  body,        // as an operation starts
  finish,      // when it has run
  record,      // as the host records an event, also for memory that goes back
  wait,        // as a stream is to wait for one
  block,       // as the host is
  memory,      // as memory changes hands, or the host touches it
  allocation,  // the pool finds no memory
  hook         // in the model's own code, forward or backward
};
inline const char* name(Trap trap) {
  const char* const names[] = {"no trap", "launch", "body",   "finish",     "record",
                               "wait",    "block",  "memory", "allocation", "hook"};
  return names[static_cast<int>(trap)];
}

struct Sprung : std::runtime_error {
  Sprung() : std::runtime_error("a trap has sprung") {}
};

// Counts the places of one rank's step, and throws at the one it is armed for.
class Trapper final : public Observer {
 public:
  // Stays with the world's device, whose streams may be at work when a test has failed.
  static Trapper& on(const World& world) {
    auto trapper = std::make_shared<Trapper>(Memory::of(world.device()).pool());
    world.device().synchronize();
    world.device().context().add_observer(trapper);
    return *trapper;
  }
  explicit Trapper(Pool& pool) : pool_(pool) {}

  // The k-th place from now on, counted from 1. `only_collectives`: of those among the operations.
  void arm(Trap trap, std::uint64_t k, bool only_collectives) {
    trap_ = trap, place_ = k, only_collectives_ = only_collectives;
    launches_ = hooks_ = 0;
    events_.fill(0);
    target_ = 0;
    has_updated_ = false;
    allocations_ = PoolTesting::allocations(pool_);
    PoolTesting::fail_at(pool_, trap == Trap::allocation ? allocations_ + k : 0);
    armed_ = true;
  }
  void disarm() {
    armed_ = false;
    PoolTesting::fail_at(pool_, 0);
    trap_ = Trap::none;
    allocations_ = PoolTesting::allocations(pool_) - allocations_;
  }
  // Places since it was armed.
  std::uint64_t count(Trap trap) const {
    switch (trap) {
      case Trap::allocation:
        return allocations_;
      case Trap::hook:
        return hooks_;
      case Trap::record:
      case Trap::wait:
      case Trap::block:
      case Trap::memory:
        return events_[static_cast<std::size_t>(trap)];
      default:
        return launches_;
    }
  }
  // Whether the body of an update has started since it was armed.
  bool has_updated() const { return has_updated_; }

  // The model passes one of its places.
  void hook() {
    if (armed_ && ++hooks_ == place_ && trap_ == Trap::hook) throw Sprung();
  }
  void launched(StreamId stream, Tick tick, const Op& op) override {
    if (!armed_ || (only_collectives_ && op.cost.wire_bytes == 0)) return;
    if (++launches_ != place_) return;
    if (trap_ == Trap::launch) throw Sprung();
    target_ = key(stream, tick);
  }
  void recorded(const Event&) override { pass(Trap::record); }
  void waited(StreamId, const Event&) override { pass(Trap::wait); }
  void blocked(const Event&) override { pass(Trap::block); }
  void memory(const MemoryEvent&) override { pass(Trap::memory); }
  void started(StreamId stream, Tick tick, const char* name) override {
    if (std::string_view(name) == "adamw") has_updated_ = true;
    if (trap_ == Trap::body && target_ == key(stream, tick)) throw Sprung();
  }
  void finished(StreamId stream, Tick tick, const char*) override {
    if (trap_ == Trap::finish && target_ == key(stream, tick)) throw Sprung();
  }

 private:
  // From its place on: what cleans up after the first one is not spared.
  void pass(Trap kind) {
    if (armed_ && ++events_[static_cast<std::size_t>(kind)] >= place_ && trap_ == kind)
      throw Sprung();
  }
  static std::uint64_t key(StreamId stream, Tick tick) {
    return (std::uint64_t{1} << 63) | (static_cast<std::uint64_t>(stream) << 56) | tick;
  }

  Pool& pool_;
  bool armed_ = false, only_collectives_ = false;
  std::uint64_t place_ = 0, launches_ = 0, hooks_ = 0, allocations_ = 0;
  std::array<std::uint64_t, 10> events_{};  // by Trap
  std::atomic<Trap> trap_{Trap::none};
  std::atomic<std::uint64_t> target_{0};
  std::atomic<bool> has_updated_{false};
};

}  // namespace tessera::testing
