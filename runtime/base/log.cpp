#include "tessera/base/log.hpp"

#include <mutex>
#include <utility>

namespace tessera {
namespace {

struct Sink {
  std::mutex mutex;
  LogSink call;
};

Sink& sink() {
  static Sink instance;
  return instance;
}

}  // namespace

void set_log_sink(LogSink call) {
  const std::lock_guard lock(sink().mutex);
  sink().call = std::move(call);
}

void log(LogLevel level, const std::string& message) {
  const std::lock_guard lock(sink().mutex);
  if (sink().call) sink().call(level, message);
}

}  // namespace tessera
