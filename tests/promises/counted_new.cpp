// Replaces operator new and delete by ones that count. The twin no_counted_new.cpp is for
// sanitizers, which bring their own.
#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "tests/promises/allocations.hpp"

namespace {

std::atomic<std::int64_t> made{0}, freed{0}, held_bytes{0}, peak_bytes{0};
thread_local std::int64_t allowed = -1;  // negative: all

void* allocate(std::size_t bytes, std::size_t alignment) {
  const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
  void* const p = std::aligned_alloc(alignment, whole == 0 ? alignment : whole);
  if (!p) throw std::bad_alloc();
  if (allowed == 0) {
    std::free(p);
    throw std::bad_alloc();
  }
  if (allowed > 0) --allowed;
  made.fetch_add(1, std::memory_order_relaxed);
  const auto size = static_cast<std::int64_t>(malloc_usable_size(p));
  const std::int64_t held = held_bytes.fetch_add(size, std::memory_order_relaxed) + size;
  std::int64_t peak = peak_bytes.load(std::memory_order_relaxed);
  while (held > peak && !peak_bytes.compare_exchange_weak(peak, held, std::memory_order_relaxed)) {
  }
  return p;
}
void release(void* p) noexcept {
  if (p) {
    freed.fetch_add(1, std::memory_order_relaxed);
    held_bytes.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(p)),
                         std::memory_order_relaxed);
  }
  std::free(p);
}

}  // namespace

tessera::testing::Allocations tessera::testing::allocations() {
  return {made.load(), freed.load(), held_bytes.load(), peak_bytes.load()};
}

void tessera::testing::reset_peak_of_allocations() { peak_bytes = held_bytes.load(); }

void tessera::testing::refuse_allocations(std::int64_t from) { allowed = from; }

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
