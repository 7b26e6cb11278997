// Where the messages of the library below `ts::run` go. The library writes nowhere itself: it calls
// the sink that the program set, and without a sink it says nothing. Threads: `set_log_sink` before
// other calls.
#pragma once

#include <functional>
#include <string>

namespace tessera {

enum class LogLevel { info, warning, error };

using LogSink = std::function<void(LogLevel, const std::string& message)>;

// Sets the sink; with an empty one the library says nothing.
void set_log_sink(LogSink sink);
void log(LogLevel level, const std::string& message);

}  // namespace tessera
