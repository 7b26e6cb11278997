// UTF-8 from outside: what is well formed, and how any bytes are shown in a message of one line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// The length of the UTF-8 sequence that `text` starts with; 0 if it is empty or not well formed
// (overlong, a surrogate, beyond U+10FFFF, cut off).  Source: The Unicode Standard 15.0, table 3-7.
constexpr std::size_t utf8_length(std::string_view text) {
  const auto in = [&](std::size_t i, unsigned low, unsigned high) {
    const unsigned byte = i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    return byte >= low && byte <= high;
  };
  if (text.empty()) return 0;
  const unsigned lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return 1;
  if (in(0, 0xc2, 0xdf)) return in(1, 0x80, 0xbf) ? 2 : 0;
  if (in(0, 0xe0, 0xef)) {
    const bool second = in(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf);
    return second && in(2, 0x80, 0xbf) ? 3 : 0;
  }
  if (in(0, 0xf0, 0xf4)) {
    const bool second = in(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf);
    return second && in(2, 0x80, 0xbf) && in(3, 0x80, 0xbf) ? 4 : 0;
  }
  return 0;
}

constexpr bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

// Whether the character that `text` starts with is one that a terminal obeys: a control character
// (C0, DEL, C1), the end of a line or paragraph, or what turns the direction of the text behind it.
constexpr bool is_control(std::string_view text) {
  const std::string_view c = text.substr(0, utf8_length(text));
  if (c.empty()) return false;
  const auto last = static_cast<unsigned char>(c.back());
  if (c.size() == 1) return last < 0x20 || last == 0x7f;
  return (c.starts_with("\xc2") && last <= 0x9f) ||                      // U+0080 to U+009F
         (c.starts_with("\xe2\x80") && last >= 0xa8 && last <= 0xae) ||  // U+2028 to U+202E
         (c.starts_with("\xe2\x81") && last >= 0xa6 && last <= 0xa9);    // U+2066 to U+2069
}

// `text` with '?' for every such character and every byte that is not UTF-8.
inline std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const bool plain = length > 0 && !is_control(text);
    out += plain ? text.substr(0, length) : std::string_view("?");
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

// `text`, or, where that is longer than 200 bytes, its head and its tail: a path or a value that a
// message quotes. No character is cut.
inline std::string shortened(std::string_view text) {
  constexpr std::size_t kMost = 200, kHead = 120, kTail = 60;
  if (text.size() <= kMost) return std::string(text);
  std::size_t head = 0, tail = 0;
  for (std::size_t at = 0; at < text.size() && tail == 0;) {
    at += std::max<std::size_t>(utf8_length(text.substr(at)), 1);
    if (at <= kHead) head = at;
    if (at >= text.size() - kTail) tail = at;
  }
  return std::string(text.substr(0, head)).append("...").append(text.substr(tail));
}

// A name from outside for an error message: quoted, printable, cut to 60 bytes.
inline std::string shown(std::string_view name) {
  constexpr std::size_t kMost = 60;
  return "'" + printable(name.substr(0, kMost)) + (name.size() > kMost ? "...'" : "'");
}

// `text` with U+FFFD for every byte that is not UTF-8; line ends and the like stay.
inline std::string as_utf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    out += length > 0 ? text.substr(0, length) : std::string_view("\xef\xbf\xbd");
    text.remove_prefix(length > 0 ? length : 1);
  }
  return out;
}

static_assert(utf8_length("\xe2\x82\xac!") == 3 && utf8_length("\xc0\xaf") == 0);
static_assert(utf8_length("\xed\xa0\x80") == 0 && is_utf8("a\xf0\x9f\x98\x80") &&
              !is_utf8("a\xf0\x9f"));
static_assert(is_control("\x1b[") && is_control("\xc2\x9b") && is_control("\xe2\x80\xa8") &&
              !is_control("\xc2\xa0") && !is_control("\xe2\x80\xa7") && !is_control(""));

}  // namespace tessera
