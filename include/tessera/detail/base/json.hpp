// JSON as text: strings and numbers, for whoever writes a file or a line that other programs read.
// There is no reader here: what comes from outside has its own parser, beside its checks.
// Source: RFC 8259.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/detail/base/utf8.hpp"

namespace tessera::json {

// `text` as a JSON string with its quotes. Control characters and DEL are \u00xx, so that it stays
// one line, and is a basic string of TOML 1.0 too. Each byte that is not UTF-8 becomes U+FFFD, so
// that the whole is JSON whatever the name of a unit or file is; who can't lose a byte asks is_utf8
// first.
inline std::string quote(std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef";
  std::string out = "\"";
  while (!text.empty()) {
    const auto byte = static_cast<unsigned char>(text[0]);
    const std::size_t length = utf8_length(text);
    if (length == 0)
      out += "\xef\xbf\xbd";
    else if (byte == '"' || byte == '\\')
      out += {'\\', text[0]};
    else if (byte < 0x20 || byte == 0x7f)
      out += {'\\', 'u', '0', '0', hex[byte >> 4], hex[byte & 15]};
    else
      out += text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out + '"';
}

// The shortest text that reads back to the same double; null for NaN and infinity, which JSON
// lacks, and for a value that is not set.
inline std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}
inline std::string number(std::int64_t value) { return std::to_string(value); }
template <class T>
std::string number(const std::optional<T>& value) {
  return value ? number(*value) : "null";
}

}  // namespace tessera::json
