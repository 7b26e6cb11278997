// What a captured step has for itself. It has a pool, so that nobody else is given memory that its
// replays write. And it has the values that the host gives each replay anew, as an optimizer's
// rate, its count of steps and keys of dropout: one struct on the device, which one copy fills.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "tessera/memory/memory.hpp"

namespace tessera {

class StepMemory {
 public:
  explicit StepMemory(const Device& device);
  ~StepMemory();
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;

  // While its step is captured or the values of a replay are made: that one; else null.
  static StepMemory* of(const Device& device);
  static StepMemory* of(DeviceContext& context);
  // Whether a step's function runs, captured or not.
  static bool is_inside(const Device& device);

  // Allocations in its scope come from the pool, at addresses that depend on what is in use there.
  class Scope {
   public:
    explicit Scope(StepMemory& step);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Memory& memory_;
    Pool* before_;
  };
  // In its scope `of` finds this one.
  class InUse {
   public:
    explicit InUse(StepMemory& step);
    ~InUse();
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Memory& memory_;
    StepMemory* before_;
  };

  // Where the host writes a value, and where operations of the step read it.
  struct Value {
    std::byte* host;
    const std::byte* device;
  };
  // That of `key`, an address say: made while the step is captured, found when it is replayed.
  // Throws: ContractError where there are more than the struct holds, or there is none to find.
  Value value_of(std::uint64_t key, std::int64_t bytes);
  // Called before every replay but the first, whose values are there: what the step's own code on
  // the host would do, as counting it, and giving values.
  void before_replay(std::function<void()> function);
  // The functions of before_replay.
  void renew() const;
  // The step depends on a state of the host, as whether there is a gradient. `now` is that state
  // before the step changes it, and the lowest bit of `state()` is the state at any time. Of each
  // `what` the first call counts.
  void depends_on(const void* what, bool now, std::function<int()> state);
  // At the end of the capture: whether the step ends as it began. From here on `holds` says whether
  // all is as it is now.
  bool settle();
  bool holds() const;
  // Copies the values to the device, if there are any.
  void upload();
  // What was captured is forgotten.
  void forget();

 private:
  Memory& memory_;
  DeviceContext& context_;
  Pool* pool_;
  std::vector<std::byte> image_;
  Buffer struct_;
  std::int64_t used_ = 0;
  std::map<std::uint64_t, std::int64_t> offsets_;
  std::vector<std::function<void()>> functions_;
  struct State {
    bool before;
    std::function<int()> get;
    int settled = 0;
  };
  std::map<const void*, State> states_;
};

}  // namespace tessera
