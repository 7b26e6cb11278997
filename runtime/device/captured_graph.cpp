// The graph of a capture, which its device may drop while others hold it.
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/detail/device/captured_work.hpp"

namespace tessera {

void CapturedGraph::set(std::shared_ptr<void> graph) {
  {
    const std::lock_guard lock(mutex_);
    if (why_dropped_.empty()) graph_ = std::move(graph);
  }
  static_cast<void>(get());
}

std::shared_ptr<void> CapturedGraph::get() const {
  const std::lock_guard lock(mutex_);
  if (!why_dropped_.empty())
    throw CommError(concat("captured step: its graph was dropped, since ", why_dropped_,
                           "; what is called from here on is captured anew"));
  return graph_;
}

void CapturedGraph::drop(const std::string& why) {
  std::shared_ptr<void> last;  // ends after the lock
  const std::lock_guard lock(mutex_);
  if (why_dropped_.empty()) why_dropped_ = why;
  last = std::move(graph_);
}

std::string CapturedGraph::why_dropped() const {
  const std::lock_guard lock(mutex_);
  return why_dropped_;
}

}  // namespace tessera
