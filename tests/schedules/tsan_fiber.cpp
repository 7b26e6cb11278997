// Streams as fibers of ThreadSanitizer, each with a stack and kernels' scratch of its own: two
// bodies of different streams that used one stack would look like a race. Switching hands no clock
// over.
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <exception>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/device/workers.hpp"
#include "tests/schedules/fiber.hpp"

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}

namespace tessera::schedules {
namespace {

constexpr unsigned kNoSync = 1;
constexpr std::size_t kStackBytes = std::size_t{8} << 20;  // what threads have
constexpr std::size_t kBytes = kStackBytes + kScratchBytes;

// Two addresses that clocks are left at; the sanitizer keeps one clock for 8 bytes.
struct Point {
  alignas(8) std::byte submitted[8];
  std::byte finished[8];
};

}  // namespace

struct StreamFiber::State {
  void* fiber = nullptr;       // made at first use
  void* caller = nullptr;      // who switched to it
  std::byte* stack = nullptr;  // kBytes: the scratch lies above it
  ucontext_t home{}, away{};
  Body body;
  Exec exec;
  std::exception_ptr error;
  std::deque<Point> points;  // by tick; addresses stay

  void enter() {
    if (fiber == nullptr) make();
    caller = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber, kNoSync);
  }
  void exit() { __tsan_switch_to_fiber(caller, kNoSync); }

  void make() {
    void* const memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw OutOfMemory("StreamFiber: the system has no stack left");
    stack = static_cast<std::byte*>(memory);
    mprotect(memory, 4096, PROT_NONE);  // a stack that is too small shows
    fiber = __tsan_create_fiber(0);
    getcontext(&away);
    away.uc_stack.ss_sp = memory;
    away.uc_stack.ss_size = kStackBytes;
    away.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&away, reinterpret_cast<void (*)()>(&State::main), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
  }

  // The fiber's own loop: a body, then back to whoever asked for it.
  static void main(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<State*>((std::uintptr_t{high} << 32) | low);
    for (;;) {
      try {
        self->body.invoke(self->body.bytes, self->exec);
      } catch (...) {
        self->error = std::current_exception();
      }
      self->exit();
      swapcontext(&self->away, &self->home);
    }
  }
};

StreamFiber::StreamFiber() : state_(std::make_unique<State>()) {}

StreamFiber::~StreamFiber() {
  if (state_->fiber == nullptr) return;
  for (std::size_t tick = 0; tick < state_->points.size(); ++tick)
    __tsan_acquire(&state_->points[tick].finished);
  __tsan_destroy_fiber(state_->fiber);
  munmap(state_->stack, kBytes);
}

void StreamFiber::submitted(Tick tick) {
  while (state_->points.size() <= tick) state_->points.emplace_back();
  __tsan_release(&state_->points[tick].submitted);
}

void StreamFiber::run(Tick tick, const Body& body, Exec& exec) {
  State& s = *state_;
  s.error = nullptr;
  if (s.fiber == nullptr) s.make();
  // The queue's copy goes when the host says so; the fiber reads its own, of which the sanitizer
  // knows nothing. No more does it of whose scratch the thread has.
  __tsan_ignore_thread_begin();
  s.body = body;
  s.exec = exec;
  std::byte* const scratch = exchange_thread_scratch(s.stack + kStackBytes);
  __tsan_ignore_thread_end();
  s.enter();
  __tsan_acquire(&s.points[tick].submitted);
  swapcontext(&s.home, &s.away);
  __tsan_ignore_thread_begin();
  exchange_thread_scratch(scratch);
  __tsan_ignore_thread_end();
  if (!s.error) return;
  // The caller will read the exception, and nothing runs here any more.
  arrive(&s.error);
  __tsan_acquire(&s.error);
  std::rethrow_exception(std::exchange(s.error, nullptr));
}

void StreamFiber::finished(Tick tick) {
  state_->enter();
  __tsan_release(&state_->points[tick].finished);
  state_->exit();
}

void StreamFiber::learn(StreamFiber& other, Tick tick) {
  if (tick >= other.state_->points.size()) return;  // nothing of it was ever submitted here
  state_->enter();
  __tsan_acquire(&other.state_->points[tick].finished);
  state_->exit();
}

void StreamFiber::teach_caller(Tick tick) {
  if (tick < state_->points.size()) __tsan_acquire(&state_->points[tick].finished);
}

void StreamFiber::arrive(const void* barrier) {
  state_->enter();
  __tsan_release(const_cast<void*>(barrier));
  state_->exit();
}

void StreamFiber::leave(const void* barrier) {
  state_->enter();
  __tsan_acquire(const_cast<void*>(barrier));
  state_->exit();
}

}  // namespace tessera::schedules
