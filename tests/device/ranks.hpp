// Several ranks as threads for the tests of this folder: one device each, one barrier between them,
// and for each rank what it threw. Assertions belong outside: Catch's are not made for several
// threads.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/device/device.hpp"

namespace tessera::testing {

class Ranks {
 public:
  Ranks(ExecutorChoice executor, int size)
      : barrier(abort_signal, size), executor_(std::move(executor)), size_(size) {
    if (executor_.make_scheduler) scheduler = executor_.make_scheduler(size);
  }

  // f(device, rank) on each rank's thread. Returns what each threw, empty where nothing.
  template <class F>
  std::vector<std::string> run(const F& f) {
    std::vector<std::string> thrown(static_cast<std::size_t>(size_));
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r)
      threads.emplace_back([&, r] {
        if (scheduler) scheduler->attach(r);
        {
          Device device = Device::cpu({.executor = executor_, .rank = r, .scheduler = scheduler});
          try {
            f(device, r);
            device.synchronize();
          } catch (const std::exception& e) {
            thrown[static_cast<std::size_t>(r)] = e.what();
            if (host_aborts) abort_signal.abort(e.what());
          }
        }
        if (scheduler) scheduler->detach(r);
      });
    for (std::thread& thread : threads) thread.join();
    return thrown;
  }

  AbortSignal abort_signal;
  CollectiveBarrier barrier;
  std::shared_ptr<HostScheduler> scheduler;  // null where the executor has none
  bool host_aborts = true;  // a rank whose host throws tells its peers, as a world does

 private:
  ExecutorChoice executor_;
  int size_;
};

}  // namespace tessera::testing
