// Where the messages of the library below `ts::run` go. It writes nowhere itself: it calls the sink
// that the program set, and without one says nothing. Threads: `set_log_sink` before other calls.
#pragma once

#include <functional>
#include <string>

namespace tessera {

enum class LogLevel { info, warning, error };

using LogSink = std::function<void(LogLevel, const std::string& message)>;

// An empty sink says nothing again.
void set_log_sink(LogSink sink);
void log(LogLevel level, const std::string& message);

}  // namespace tessera
