#include "tessera/device/executor.hpp"

#include <chrono>

#include "runtime/device/executors/executors.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

std::string_view name(ExecutorKind kind) {
  switch (kind) {
    case ExecutorKind::threaded:
      return "threaded";
    case ExecutorKind::inlined:
      return "inline";
    case ExecutorKind::cuda:
      return "cuda";
    case ExecutorKind::virtual_:
      break;
  }
  return "virtual";
}

std::string_view name(const ExecutorChoice& choice) {
  return choice.make ? choice.own_name : name(choice.kind);
}

double Executor::host_seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<Executor> make_executor(const ExecutorOptions& options,
                                        const Observers& observers) {
  TESSERA_EXPECT(options.rank >= 0, "make_executor: rank ", options.rank, " is negative");
  TESSERA_EXPECT(options.threads >= 1, "make_executor: ", options.threads,
                 " threads per rank; give at least 1");
  if (options.executor.make) return options.executor.make(options, observers);
  TESSERA_EXPECT(options.executor == ExecutorKind::virtual_ ||
                     (options.cost == CostModel{} && !options.run_bodies),
                 "make_executor: '", name(options.executor),
                 "' takes no cost model and no run_bodies; only 'virtual' takes them");
  switch (options.executor.kind) {
    case ExecutorKind::threaded:
      return make_threaded(options, observers);
    case ExecutorKind::inlined:
      return make_inline(options, observers);
    case ExecutorKind::cuda:
      TESSERA_EXPECT(options.driver != nullptr,
                     "make_executor: 'cuda' has no driver; make the device with Device::cuda");
      return make_cuda(options, observers);
    case ExecutorKind::virtual_:
      break;
  }
  return make_virtual(options, observers);
}

}  // namespace tessera
