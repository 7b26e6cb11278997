#include "runtime/checkpoint/safetensors_header.hpp"

#include <cstdint>
#include <set>
#include <utility>

#include "tessera/base/checked.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/json.hpp"
#include "tessera/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::pair<std::string_view, DType> kDtypes[] = {
    {"F32", f32}, {"BF16", bf16},    {"F16", f16},      {"F64", f64},     {"I32", i32},
    {"I64", i64}, {"BOOL", boolean}, {"F8_E4M3", e4m3}, {"F8_E5M2", e5m2}};
// What other programs write beside, with the bytes of an element.
constexpr std::pair<std::string_view, std::int64_t> kForeign[] = {
    {"U8", 1},  {"I8", 1},  {"F8_E8M0", 1}, {"I16", 2},
    {"U16", 2}, {"U32", 4}, {"U64", 8},     {"C64", 8}};
constexpr std::size_t kShownBytes = 60;  // of a name in an error message
constexpr std::string_view kMetadata = "__metadata__";

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3f));
  } else {
    put(0xf0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3f));
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

// A recursive-descent reader whose depth is fixed by the document's shape, so that nesting cannot
// exhaust the stack.
class HeaderReader {
 public:
  HeaderReader(std::string_view json, const std::string& file, const char* part = "a header")
      : json_(json), file_(file), part_(part) {}

  // {"weight_map": {name: file}}, and what else stands beside it.
  std::map<std::string, std::string> read_index() {
    std::map<std::string, std::string> files;
    bool has_map = false;
    read_members([&](const std::string& key) {
      if (key != "weight_map") return skip_value();
      has_map = true;
      read_members([&](std::string name) {
        skip_space();
        files[std::move(name)] = string();
      });
    });
    skip_space();
    if (at_ != json_.size()) fail("goes on after its end");
    if (!has_map) fail("lacks \"weight_map\"");
    return files;
  }

  SafetensorsHeader read() {
    if (json_.empty() || json_[0] != '{') fail("does not begin with '{'");
    read_members([&](std::string key) {
      if (key == kMetadata) {
        read_members([&](std::string name) { header_.metadata[std::move(name)] = string(); });
      } else {
        read_tensor(std::move(key));
      }
    });
    skip_space();
    if (at_ != json_.size()) fail("goes on after its end");
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(concat(file_, " has ", part_, " that ", what, " (byte ", at_,
                           " of the JSON); write the file again"));
  }
  [[noreturn]] void fail_tensor(const std::string& tensor, const std::string& what) const {
    throw DataError(concat(file_, ": tensor ", shown(tensor), " ", what));
  }

  void skip_space() {
    while (at_ < json_.size() &&
           std::string_view(" \t\r\n").find(json_[at_]) != std::string_view::npos)
      ++at_;
  }
  bool take(char c) {
    skip_space();
    if (at_ >= json_.size() || json_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(concat("lacks '", c, "'"));
  }

  // {"key": <read by `member`>, ...} with every key once.
  template <class F>
  void read_members(F&& member) {
    std::set<std::string> seen;
    expect('{');
    if (take('}')) return;
    do {
      skip_space();
      std::string key = string();
      if (!seen.insert(key).second) fail(concat("names ", shown(key), " twice"));
      expect(':');
      member(std::move(key));
    } while (take(','));
    expect('}');
  }

  // A value that nobody wants, of any depth: to the comma or bracket behind it.
  void skip_value() {
    skip_space();
    const std::size_t begin = at_;
    for (std::size_t depth = 0; at_ < json_.size(); skip_space()) {
      const char c = json_[at_];
      if (depth == 0 && (c == ',' || c == '}' || c == ']')) break;
      if (c == '"') {
        string();
        continue;
      }
      if (c == '{' || c == '[') ++depth;
      if (c == '}' || c == ']') --depth;
      ++at_;
    }
    if (at_ == begin) fail("has a key without a value");
  }

  void read_tensor(std::string name) {
    SafetensorsEntry entry{.name = std::move(name)};
    std::vector<std::int64_t> offsets;
    bool has_dtype = false, has_shape = false, has_offsets = false;
    read_members([&](const std::string& key) {
      if (key == "dtype") {
        has_dtype = true;
        read_dtype(entry);
      } else if (key == "shape") {
        has_shape = true;
        entry.shape = integers(entry.name);
      } else if (key == "data_offsets") {
        has_offsets = true;
        offsets = integers(entry.name);
      } else {
        fail_tensor(entry.name, concat("has the unknown key ", shown(key)));
      }
    });
    if (!has_dtype || !has_shape || !has_offsets) {
      fail_tensor(entry.name, concat("lacks ", !has_dtype   ? "dtype"
                                               : !has_shape ? "shape"
                                                            : "data_offsets"));
    }
    if (offsets.size() != 2) {
      fail_tensor(entry.name,
                  concat("has ", offsets.size(), " data_offsets, expected begin and end"));
    }
    set_extent(entry, offsets[0], offsets[1]);
    header_.entries.push_back(std::move(entry));
  }

  void set_extent(SafetensorsEntry& entry, std::int64_t begin, std::int64_t end) const {
    if (begin > end)
      fail_tensor(entry.name, concat("ends at ", end, ", before it begins at ", begin));
    std::int64_t expected = static_cast<std::int64_t>(size_bytes(entry.dtype));
    for (const auto& [name, bytes] : kForeign)
      if (name == entry.foreign) expected = bytes;
    bool empty = false;
    for (const std::int64_t extent : entry.shape) empty = empty || extent == 0;
    try {
      for (const std::int64_t extent : entry.shape)
        expected = checked_mul(expected, empty ? 0 : extent);
    } catch (const ContractError&) {
      fail_tensor(entry.name, "has a shape whose product overflows 64 bits");
    }
    if (end - begin != expected) {
      fail_tensor(entry.name, concat("has data_offsets [", begin, ", ", end, "], ", end - begin,
                                     " bytes, but its shape and dtype need ", expected));
    }
    entry.begin_bytes = begin;
    entry.size_bytes = expected;
  }

  void read_dtype(SafetensorsEntry& entry) {
    const std::string text = string();
    for (const auto& [name, dtype] : kDtypes) {
      if (name == text) {
        entry.dtype = dtype;
        return;
      }
    }
    for (const auto& [name, bytes] : kForeign) {
      if (name == text) {
        entry.foreign = text;
        return;
      }
    }
    fail_tensor(entry.name,
                concat("has dtype ", shown(text),
                       ", of which not even the size is known; write it as F32 or BF16"));
  }

  // [non-negative 64-bit integers]; JSON allows neither signs nor leading zeros here.
  std::vector<std::int64_t> integers(const std::string& tensor) {
    std::vector<std::int64_t> values;
    expect('[');
    if (take(']')) return values;
    do {
      skip_space();
      const std::size_t begin = at_;
      std::int64_t value = 0;
      while (at_ < json_.size() && json_[at_] >= '0' && json_[at_] <= '9') {
        const std::int64_t digit = json_[at_++] - '0';
        if (value > (INT64_MAX - digit) / 10) fail_tensor(tensor, "has a number beyond 64 bits");
        value = 10 * value + digit;
      }
      const bool zero_led = at_ - begin > 1 && json_[begin] == '0';
      if (at_ == begin || zero_led)
        fail_tensor(tensor, "has a shape or offset that is no non-negative integer");
      values.push_back(value);
    } while (take(','));
    if (!take(']')) fail_tensor(tensor, "has a shape or offset that is no non-negative integer");
    return values;
  }

  std::string string() {
    expect('"');
    std::string text;
    while (at_ < json_.size() && json_[at_] != '"') {
      const std::string_view rest = json_.substr(at_);
      if (static_cast<unsigned char>(rest[0]) < 0x20) fail("has a control character in a string");
      if (rest[0] == '\\') {
        ++at_;
        escape(text);
        continue;
      }
      const std::size_t length = utf8_length(rest);
      if (length == 0) fail("is not UTF-8");
      text += rest.substr(0, length);
      at_ += length;
    }
    if (at_ >= json_.size()) fail("has a string without an end");
    ++at_;
    return text;
  }

  void escape(std::string& text) {
    const char c = at_ < json_.size() ? json_[at_++] : '\0';
    constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    if (const std::size_t i = from.find(c); i != std::string_view::npos) {
      text += to[i];
      return;
    }
    if (c != 'u') fail("has an unknown escape");
    std::uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      if (json_.substr(at_, 2) != "\\u") fail("has half a surrogate pair");
      at_ += 2;
      const std::uint32_t low = hex4();
      if (low < 0xdc00 || low > 0xdfff) fail("has half a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      fail("has half a surrogate pair");
    }
    append_utf8(text, code);
  }

  std::uint32_t hex4() {
    std::uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < json_.size() ? json_[at_] : '\0';
      const std::size_t digit = std::string_view("0123456789abcdef")
                                    .find(c >= 'A' && c <= 'F' ? static_cast<char>(c + 32) : c);
      if (digit == std::string_view::npos) fail("has a \\u escape without four hexadecimal digits");
      code = code << 4 | static_cast<std::uint32_t>(digit);
      ++at_;
    }
    return code;
  }

  std::string_view json_;
  const std::string& file_;
  const char* part_;
  std::size_t at_ = 0;
  SafetensorsHeader header_;
};

std::string quoted(std::string_view text) {
  TESSERA_EXPECT(is_utf8(text), "SafetensorsWriter: ", shown(text), " is not UTF-8");
  return json::quote(text);
}

std::string_view safetensors_name(DType dtype) {
  for (const auto& [name, value] : kDtypes) {
    if (value == dtype) return name;
  }
  TESSERA_EXPECT(false, "SafetensorsWriter: no name for dtype ", dtype);
  return {};
}

}  // namespace

std::string shown(std::string_view name) {
  if (name.size() <= kShownBytes) return concat("'", printable(name), "'");
  return concat("'", printable(name.substr(0, kShownBytes)), "...'");
}

SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file) {
  return HeaderReader(json, file).read();
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view json,
                                                           const std::string& file) {
  return HeaderReader(json, file, "a text").read_index();
}

std::string format_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  std::string out = "{";
  const auto separate = [&] {
    if (out.size() > 1) out += ',';
  };
  if (!metadata.empty()) {
    out += concat(quoted(kMetadata), ":{");
    bool first = true;
    for (const auto& [key, value] : metadata) {
      out += concat(std::exchange(first, false) ? "" : ",", quoted(key), ":", quoted(value));
    }
    out += '}';
  }
  for (const SafetensorsEntry& entry : entries) {
    separate();
    std::string shape;
    for (const std::int64_t extent : entry.shape) shape += concat(shape.empty() ? "" : ",", extent);
    out += concat(quoted(entry.name), ":{\"dtype\":\"", safetensors_name(entry.dtype),
                  "\",\"shape\":[", shape, "],\"data_offsets\":[", entry.begin_bytes, ",",
                  entry.begin_bytes + entry.size_bytes, "]}");
  }
  out += '}';
  out.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(out.size()), 8)), ' ');
  return out;
}

}  // namespace tessera::checkpoint
