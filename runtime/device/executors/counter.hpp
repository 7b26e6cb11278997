// A number that only grows and that threads sleep on: completed ticks, submitted and consumed
// items. One thread advances it; any number wait. Advancing costs one store and one load while
// nobody sleeps below the new value, so a worker may advance it after every operation.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

class alignas(64) Counter {
 public:
  std::uint64_t load() const noexcept { return value_.load(std::memory_order_seq_cst); }

  // Only ever called by one thread, with growing values.
  void advance(std::uint64_t value) noexcept {
    value_.store(value, std::memory_order_seq_cst);
    if (wanted_.load(std::memory_order_seq_cst) <= value) wake();
  }

  // Sleeps, after a short spin, until the value is at least `target`.
  void wait_for(std::uint64_t target) noexcept {
    for (int spin = 0; spin < kSpins; ++spin)
      if (load() >= target) return;
    for (;;) {
      // See Note [Sleeping on a counter].
      const std::uint32_t seen = wakes_.load(std::memory_order_seq_cst);
      std::uint64_t wanted = wanted_.load(std::memory_order_seq_cst);
      while (target < wanted && !wanted_.compare_exchange_weak(wanted, target)) {
      }
      if (load() >= target) return;
      wakes_.wait(seen, std::memory_order_seq_cst);
      if (load() >= target) return;
    }
  }

 private:
  // Note [Sleeping on a counter]
  // A sleeper reads the count of wakes, lowers `wanted` to its target, looks at the value once more
  // and sleeps on the count. The advancing thread stores the value, then reads `wanted`. All are
  // sequentially consistent, so either the sleeper sees the value or the other sees its wish. A
  // wish that is cleared with somebody else's is not lost: the count moves after the clearing, so
  // that sleeper wakes and wishes again.
  void wake() noexcept {
    wanted_.store(kNobody, std::memory_order_seq_cst);
    wakes_.fetch_add(1, std::memory_order_seq_cst);
    wakes_.notify_all();
  }

  static constexpr std::uint64_t kNobody = ~std::uint64_t{0};
  // Less than a sleep costs, nothing beside a time slice.
  static constexpr int kSpins = 200;

  std::atomic<std::uint64_t> value_{0};
  std::atomic<std::uint64_t> wanted_{kNobody};  // the lowest target that somebody sleeps for
  std::atomic<std::uint32_t> wakes_{0};
};

}  // namespace tessera
