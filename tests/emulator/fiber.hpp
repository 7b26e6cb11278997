// Control that is handed from one stack to another within a host thread.
#pragma once

#include <cstddef>
#include <memory>

namespace tessera::kernels::cuda::emulator {

// Runs entry(argument) on a stack of its own, in turns: `resume` goes on with it until it pauses or
// ends. Reusable after its end. Not movable: `entry` may keep its address.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void start(void (*entry)(void* argument), void* argument);
  // Requires: started and not ended.
  void resume();
  // Called inside: back to the caller of `resume`.
  void pause();
  bool ended() const noexcept { return ended_; }

  // For the first frame of the new stack.
  void enter();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool ended_ = true;
};

}  // namespace tessera::kernels::cuda::emulator
