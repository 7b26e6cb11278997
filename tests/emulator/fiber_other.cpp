// Fibers where there is no switch of our own: POSIX contexts.
#include <ucontext.h>

#include <cstdint>
#include <vector>

#include "tests/emulator/fiber.hpp"

namespace tessera::kernels::cuda::emulator {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;

void run(unsigned high, unsigned low) {
  const auto address = (static_cast<std::uint64_t>(high) << 32) | low;
  reinterpret_cast<Fiber*>(static_cast<std::uintptr_t>(address))->enter();
}

}  // namespace

struct Fiber::Context {
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  ucontext_t own{}, caller{};
};

Fiber::Fiber() : context_(std::make_unique<Context>()) {}
Fiber::~Fiber() = default;

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  ended_ = false;
  getcontext(&context_->own);
  context_->own.uc_stack = {.ss_sp = context_->stack.get(), .ss_flags = 0, .ss_size = kStackBytes};
  context_->own.uc_link = nullptr;
  const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(this));
  makecontext(&context_->own, reinterpret_cast<void (*)()>(run), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
}

void Fiber::resume() { swapcontext(&context_->caller, &context_->own); }
void Fiber::pause() { swapcontext(&context_->own, &context_->caller); }

void Fiber::enter() {
  entry_(argument_);
  ended_ = true;
  pause();
}

}  // namespace tessera::kernels::cuda::emulator
