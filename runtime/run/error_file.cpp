#include "runtime/run/error_file.hpp"

#include <chrono>
#include <string>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/text.hpp"

namespace tessera {

// The summary shows `py_callstack`, and names as the root cause the file with the earliest time.
// Source: torch/distributed/elastic/multiprocessing/errors (PyTorch 1.13 to 2.9).
void write_error_file(const EnvironmentLookup& lookup, std::string_view message) noexcept {
  const char* const path = lookup("TORCHELASTIC_ERROR_FILE");
  if (!path || !*path) return;
  try {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
    const std::string text = json::quote(message);
    write_whole(path,
                concat(R"({"message": {"message": )", text, R"(, "extraInfo": {"py_callstack": )",
                       text, R"(, "timestamp": ")", seconds, R"("}}})"),
                {.flush = false});
  } catch (...) {
    log(LogLevel::warning, concat("TORCHELASTIC_ERROR_FILE: ", describe_exception()));
  }
}

}  // namespace tessera
