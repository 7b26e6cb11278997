// The makers of the executors, one for each kind; `make_executor` chooses.
#pragma once

#include <memory>

#include "tessera/device/executor.hpp"

namespace tessera {

std::unique_ptr<Executor> make_threaded(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_inline(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_shuffled(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_virtual();

}  // namespace tessera
