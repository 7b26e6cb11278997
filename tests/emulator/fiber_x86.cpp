// Fibers on x86-64: a switch saves the six registers that a call preserves, and the stack pointer.
// Its ten instructions take nanoseconds, where swapcontext asks the kernel for the signal mask.
#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "tests/emulator/fiber.hpp"

// tessera_emulator_switch(void** save, void* load)
asm(R"(
.text
.p2align 4
.type tessera_emulator_switch, @function
tessera_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tessera_emulator_switch, .-tessera_emulator_switch
.type tessera_emulator_start, @function
tessera_emulator_start:
  movq %rbx, %rdi
  callq *%r12
  ud2
.size tessera_emulator_start, .-tessera_emulator_start
)");
extern "C" void tessera_emulator_switch(void** save, void* load);
extern "C" void tessera_emulator_start();

namespace tessera::kernels::cuda::emulator {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;  // address space; pages come as they are touched

}  // namespace

struct Fiber::Context {
  std::byte* stack = nullptr;
  void* own = nullptr;  // stack pointers
  void* caller = nullptr;
};

Fiber::Fiber() : context_(std::make_unique<Context>()) {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  context_->stack = static_cast<std::byte*>(memory);
}

Fiber::~Fiber() { munmap(context_->stack, kStackBytes); }

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  ended_ = false;
  // What the switch pops: r15, r14, r13, r12, rbx, rbp, and the address it returns to. At the call
  // in tessera_emulator_start the stack is 16-byte aligned.
  auto* const top = reinterpret_cast<std::uintptr_t*>(context_->stack + kStackBytes) - 9;
  const auto run = +[](Fiber* self) { self->enter(); };
  top[0] = top[1] = top[2] = top[5] = 0;
  top[3] = reinterpret_cast<std::uintptr_t>(run);
  top[4] = reinterpret_cast<std::uintptr_t>(this);
  top[6] = reinterpret_cast<std::uintptr_t>(&tessera_emulator_start);
  context_->own = top;
}

void Fiber::resume() { tessera_emulator_switch(&context_->caller, context_->own); }
void Fiber::pause() { tessera_emulator_switch(&context_->own, context_->caller); }

void Fiber::enter() {
  entry_(argument_);
  ended_ = true;
  pause();
}

}  // namespace tessera::kernels::cuda::emulator
