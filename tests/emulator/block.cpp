// The threads of a block in turn, and their barriers.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/emulator/fiber.hpp"
#include "tests/emulator/gpu_thread.hpp"

namespace tessera::kernels::cuda {
namespace {

enum class At : std::uint8_t { running, block_barrier, warp_barrier, end };

// As many as the widest block so far; one set for each host thread.
std::vector<std::unique_ptr<emulator::Fiber>>& fibers(int count) {
  thread_local std::vector<std::unique_ptr<emulator::Fiber>> all;
  while (static_cast<int>(all.size()) < count) all.push_back(std::make_unique<emulator::Fiber>());
  return all;
}

}  // namespace

class EmulatedBlock {
 public:
  EmulatedBlock(const emulator::Launch& launch, const void* body)
      : launch_(launch), body_(body), shared_(new(std::align_val_t{1024}) std::byte[bytes()]) {
    const auto threads = static_cast<std::size_t>(launch.threads);
    threads_.reserve(threads);
    for (int i = 0; i < launch.threads; ++i) threads_.emplace_back(*this, i);
    at_.resize(threads);
    round_.resize(threads);
    for (auto& values : shown_) values.resize(threads);
  }
  ~EmulatedBlock() { ::operator delete[](shared_, std::align_val_t{1024}); }
  EmulatedBlock(const EmulatedBlock&) = delete;
  EmulatedBlock& operator=(const EmulatedBlock&) = delete;

  void run(const Grid& cell) {
    cell_ = cell;
    std::memset(shared_, 0xff, launch_.shared_bytes);
    auto& all = fibers(launch_.threads);
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      at_[i] = At::running;
      round_[i] = 0;
      all[i]->start([](void* thread) { static_cast<Thread*>(thread)->run(); }, &threads_[i]);
    }
    for (bool forward = true;; forward = !forward) {
      const std::size_t n = threads_.size();
      for (std::size_t k = 0; k < n; ++k) {
        const std::size_t i = forward ? k : n - 1 - k;
        if (at_[i] == At::running) all[i]->resume();
      }
      if (count(At::end, 0, n) == n) return;
      if (!release()) stuck();
    }
  }

  void invoke(Thread& thread) {
    launch_.invoke(body_, thread);
    at_[static_cast<std::size_t>(thread.index())] = At::end;
  }
  void pause(int thread, At at) {
    at_[static_cast<std::size_t>(thread)] = at;
    fibers(launch_.threads)[static_cast<std::size_t>(thread)]->pause();
  }
  // Two rounds of values: a lane that is ahead writes the other one, and cannot be two ahead.
  const std::uint64_t* show(int thread, std::uint64_t bits) {
    const auto i = static_cast<std::size_t>(thread);
    std::vector<std::uint64_t>& values = shown_[round_[i]++ % 2];
    values[i] = bits;
    pause(thread, At::warp_barrier);
    return values.data() + i / kWarp * kWarp;
  }
  std::uint64_t exchange(int thread, std::uint64_t bits, int lane) {
    const std::uint64_t* const values = show(thread, bits);
    const auto from =
        static_cast<std::size_t>(thread) / kWarp * kWarp + static_cast<std::size_t>(lane);
    return from < threads_.size() ? values[lane] : bits;
  }

  // One round for all: bit l is what lane l of the warp gave in it.
  unsigned ballot(int thread, bool value) {
    const auto i = static_cast<std::size_t>(thread);
    const std::uint64_t round = round_[i]++;
    std::vector<std::uint64_t>& values = shown_[round % 2];
    values[i] = round << 1 | (value ? 1u : 0u);
    pause(thread, At::warp_barrier);
    unsigned all = 0;
    const std::size_t first = i / kWarp * kWarp;
    for (std::size_t lane = 0; lane < kWarp; ++lane)  // one that has returned gave nothing
      if (values[first + lane] == (round << 1 | 1)) all |= 1u << lane;
    return all;
  }

  const emulator::Launch& launch() const { return launch_; }
  const Grid& cell() const { return cell_; }
  std::byte* shared() { return shared_; }

 private:
  std::size_t bytes() const { return launch_.shared_bytes; }

  std::size_t count(At at, std::size_t begin, std::size_t end) const {
    std::size_t n = 0;
    for (std::size_t i = begin; i < end; ++i) n += at_[i] == at;
    return n;
  }
  bool pass(At barrier, std::size_t begin, std::size_t end) {
    const std::size_t here = count(barrier, begin, end);
    if (here == 0 || here + count(At::end, begin, end) < end - begin) return false;
    for (std::size_t i = begin; i < end; ++i)
      if (at_[i] == barrier) at_[i] = At::running;
    return true;
  }
  bool release() {
    bool any = pass(At::block_barrier, 0, at_.size());
    for (std::size_t i = 0; i < at_.size(); i += kWarp)
      any = pass(At::warp_barrier, i, std::min(i + kWarp, at_.size())) || any;
    return any;
  }
  [[noreturn]] void stuck() const {
    std::fprintf(stderr,
                 "emulator: block %lld hangs: %zu threads wait at the block's barrier, %zu at "
                 "their warp's\n",
                 static_cast<long long>(cell_.x), count(At::block_barrier, 0, at_.size()),
                 count(At::warp_barrier, 0, at_.size()));
    __builtin_trap();
  }

  const emulator::Launch& launch_;
  const void* body_;
  std::byte* shared_;
  Grid cell_;
  std::vector<Thread> threads_;
  std::vector<At> at_;
  std::vector<unsigned> round_;
  std::vector<std::uint64_t> shown_[2];
};

void Thread::run() {
  block_->invoke(*this);
  expect(products_.empty() && groups_.empty(), "a thread ends before its products");
}
void Thread::expect(bool holds, const char* otherwise) {
  if (holds) return;
  std::fprintf(stderr, "emulator: %s\n", otherwise);
  __builtin_trap();
}
int WarpThread::threads() const { return block_->launch().threads; }
std::int64_t WarpThread::block() const { return block_->cell().x; }
int WarpThread::block_y() const { return static_cast<int>(block_->cell().y); }
std::int64_t WarpThread::blocks() const { return block_->launch().grid.x; }
void WarpThread::sync() { block_->pause(index_, At::block_barrier); }
void WarpThread::sync_warp() { block_->pause(index_, At::warp_barrier); }
std::byte* WarpThread::shared_memory() { return block_->shared(); }
std::uint64_t WarpThread::exchange(std::uint64_t bits, int lane) {
  return block_->exchange(index_, bits, lane);
}
const std::uint64_t* WarpThread::show(std::uint64_t bits) { return block_->show(index_, bits); }
unsigned WarpThread::ballot(bool value) { return block_->ballot(index_, value); }

namespace emulator {

void run(const Launch& launch, const void* body) {
  EmulatedBlock block(launch, body);
  for (std::int64_t z = 0; z < launch.grid.z; ++z)
    for (std::int64_t y = 0; y < launch.grid.y; ++y)
      for (std::int64_t x = 0; x < launch.grid.x; ++x) block.run({x, y, z});
}

}  // namespace emulator
}  // namespace tessera::kernels::cuda
