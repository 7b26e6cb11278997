#include "tessera/detail/memory/step_memory.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/device/queue.hpp"
#include "runtime/memory/upstream_of.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kStructBytes = 16 << 10, kValueAlignment = 16;

}  // namespace

StepMemory::StepMemory(const Device& device)
    : memory_(Memory::of(device)), context_(device.context()), image_(kStructBytes) {
  auto& idle = memory_.idle_pools_;
  if (idle.empty())
    idle.push_back(std::make_unique<Pool>(context_, memory_.ledger(),
                                          upstream_of(context_, MemorySide::device)));
  pool_ = memory_.step_pools_.emplace_back(std::move(idle.back())).get();
  idle.pop_back();
  if (memory_.poisons()) pool_->poison_freed();
  const OwnerGuard owner(device, "step values");
  pool_->sort_free();
  struct_ =
      Buffer(*pool_, pool_->allocate(kStructBytes, StreamId::compute, memory_.current_owner_));
}

StepMemory::~StepMemory() {
  struct_ = {};
  auto& pools = memory_.step_pools_;
  const auto mine = std::ranges::find(pools, pool_, &std::unique_ptr<Pool>::get);
  memory_.idle_pools_.push_back(std::move(*mine));
  pools.erase(mine);
}

StepMemory* StepMemory::of(const Device& device) {
  return device.is_meta() ? nullptr : Memory::of(device).step_in_use_;
}
StepMemory* StepMemory::of(DeviceContext& context) { return Memory::of(context).step_in_use_; }

bool StepMemory::is_inside(const Device& device) {
  return !device.is_meta() && Memory::of(device).pool_in_use_ != &Memory::of(device).pool_;
}

StepMemory::Scope::Scope(StepMemory& step) : memory_(step.memory_) {
  TESSERA_EXPECT(
      memory_.pool_in_use_ == &memory_.pool_,
      "captured step: the step runs inside another captured step; capture the outer one alone");
  step.pool_->sort_free();
  before_ = std::exchange(memory_.pool_in_use_, step.pool_);
}
StepMemory::Scope::~Scope() { memory_.pool_in_use_ = before_; }

StepMemory::InUse::InUse(StepMemory& step)
    : memory_(step.memory_), before_(std::exchange(memory_.step_in_use_, &step)) {}
StepMemory::InUse::~InUse() { memory_.step_in_use_ = before_; }

StepMemory::Value StepMemory::value_of(std::uint64_t key, std::int64_t bytes) {
  auto found = offsets_.find(key);
  if (found == offsets_.end()) {
    TESSERA_EXPECT(context_.is_capturing(),
                   "captured step: a replay has a value that the capture did not have; capture the "
                   "step again");
    TESSERA_EXPECT(used_ + bytes <= kStructBytes,
                   "captured step: the values that change from step to step take more than ",
                   kStructBytes, " bytes; split the step");
    found = offsets_.emplace(key, used_).first;
    used_ += round_up(bytes, kValueAlignment);
  }
  return {image_.data() + found->second, struct_.data() + found->second};
}

void StepMemory::before_replay(std::function<void()> function) {
  functions_.push_back(std::move(function));
}
void StepMemory::renew() const {
  for (const auto& function : functions_) function();
}

void StepMemory::upload() {
  if (used_ == 0) return;
  HostStaging::Piece& piece = memory_.staging().take(used_);
  const auto n = static_cast<std::size_t>(used_);
  context_.host_writes(piece.data, n);
  std::memcpy(piece.data, image_.data(), n);
  const Access accesses[] = {
      {&piece.use, piece.data, piece.data + n, AccessMode::read},
      {&struct_.use(), struct_.data(), struct_.data() + n, AccessMode::write}};
  context_.submit(StreamId::compute,
                  {.name = "step_values",
                   .cost = {.bytes = 2.0 * static_cast<double>(n)},
                   .accesses = accesses},
                  Body([to = struct_.data(), from = piece.data, bytes = used_](Exec& exec) {
                    queue_copy(exec, to, from, bytes);
                  }),
                  nullptr);
  memory_.staging().give_back(piece);
}

void StepMemory::depends_on(const void* what, bool now, std::function<int()> state) {
  if (context_.is_capturing()) states_.try_emplace(what, State{now, std::move(state)});
}
bool StepMemory::settle() {
  bool is_as_before = true;
  for (auto& [what, state] : states_) {
    state.settled = state.get();
    is_as_before &= (state.settled & 1) == static_cast<int>(state.before);
  }
  return is_as_before;
}
bool StepMemory::holds() const {
  return std::ranges::all_of(
      states_, [](const auto& entry) { return entry.second.get() == entry.second.settled; });
}

void StepMemory::forget() {
  states_.clear();
  used_ = 0;
  offsets_.clear();
  functions_.clear();
}

}  // namespace tessera
